"""What tells other systems about jobs. Each exporter keeps its own durable watermark and never holds up a turn."""
