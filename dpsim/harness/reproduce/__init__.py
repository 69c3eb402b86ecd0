"""``reproduce``: trains every configuration, compares all bits, and says where and why they differ."""
