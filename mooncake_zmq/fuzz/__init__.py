"""Fuzzing beside CI: every decoder of bytes from outside, guided by coverage."""
