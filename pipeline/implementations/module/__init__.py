"""The implementations of the whole attention module that are compared, one small file a peer."""
