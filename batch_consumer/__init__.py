"""The bulk door: topics become micro-batches, micro-batches become answers, answers become durable results."""
