"""`attach(model, "auto")`: measures, predicts, chooses, and chooses again when the link changes."""
