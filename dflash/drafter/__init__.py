"""The drafter: its model, its attention, its loss, and the pure steps that are compiled."""
