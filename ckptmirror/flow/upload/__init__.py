"""Uploading: what the table has pending is sent to the mirrors and verified there."""
