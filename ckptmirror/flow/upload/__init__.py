"""Uploading: sends the pending files of the table to the mirrors and verifies them there."""
