//! Test harnesses for the whole scheduler: a model, and concurrent random operations.

pub(crate) mod concurrent;
mod model;
