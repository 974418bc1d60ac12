//! Engines driven by hand.
