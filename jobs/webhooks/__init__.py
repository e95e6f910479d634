"""Webhooks after the Standard Webhooks specification: what is told, how it is signed, and where it may be sent."""
