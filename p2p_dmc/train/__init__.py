"""The trainer's side: the user's script, local steps, collectives. The only part that imports torch."""
