"""Layouts that the user gives to values and parameters."""
