"""The implementations of triangle multiplication that are compared, one small file a peer."""
