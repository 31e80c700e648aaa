"""The durable queue of heavy work: tasks, the workers that run them, and the two engines that wake workers."""
