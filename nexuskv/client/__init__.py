"""The client library: how an engine or a tool reaches a daemon. See `store.connect`."""
