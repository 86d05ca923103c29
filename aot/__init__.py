"""Compiled programs as artifacts: built once, named by their inputs, verified, loaded without a compiler."""
