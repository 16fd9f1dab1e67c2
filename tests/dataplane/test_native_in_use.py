from nexuskv.dataplane import _native, native


def test_the_c_module_is_what_callers_get() -> None:
    assert native.NATIVE
    assert native.load is _native.load


def test_name_says_which_module_and_instruction_set_is_in_use() -> None:
    assert f"native ({_native.INSTRUCTION_SET})" == native.NAME
