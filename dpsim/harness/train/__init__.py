"""``train``: one training run, new or resumed."""
