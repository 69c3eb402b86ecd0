"""Trainings whose slowness is planted, with sizes drawn at random, and what ``dpsim explain`` says of them."""
