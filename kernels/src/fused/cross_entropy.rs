//! Cross-entropy of logits, and its gradient in their place.
