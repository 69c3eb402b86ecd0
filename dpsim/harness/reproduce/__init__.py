"""``reproduce``: trains every combination, compares all bits, and says where and why they differ."""
