"""The report of a study of training quality."""
