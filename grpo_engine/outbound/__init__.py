"""Requests that leave this host, for webhooks and remote graders: where they may go, how they are signed, and how long they may take."""
