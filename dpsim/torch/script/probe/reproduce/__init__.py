"""Lets the ranks of a script train one after the other, and writes down what each of their steps held."""
