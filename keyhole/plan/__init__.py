"""What a run needs and what the machine has: bytes and seconds, predicted and measured."""
