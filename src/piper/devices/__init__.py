"""Devices and communicators: what a plan's instructions execute against."""
