"""Puts this folder on the import path, so that tests of all rooms can import its helper modules."""
