"""The trainer: everything that knows what a DFlash drafter is."""
