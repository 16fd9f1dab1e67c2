"""placeholder"""


class Follower:
    """x"""

    def __init__(self, store: object) -> None:
        pass
