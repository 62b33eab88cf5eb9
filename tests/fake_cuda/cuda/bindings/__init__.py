"""Stands before the real package in a child of a test."""
