"""The control loop: brings what the ledger says and what the world does together.

Every turn: take in claims, events and verdicts; tell Redis what is wanted; publish attempts; find lost ones; dispatch
queued jobs; retire old checkpoints. Each step is a compare-and-swap or may be repeated, so two dispatchers do no harm
and a killed one loses nothing. Knowingly left out: leader election, because nothing needs it.
"""

from __future__ import annotations

from jobs.dispatcher.loop import Dispatcher, main

__all__ = ["Dispatcher", "main"]
