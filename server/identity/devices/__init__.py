"""Devices and the one-time tokens with which they enroll."""
