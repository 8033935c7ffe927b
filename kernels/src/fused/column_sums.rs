//! Sums over rows in two stages.
