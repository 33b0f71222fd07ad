//! Tables: their rows, their migrations, and statements written together.

pub(crate) mod entity;
pub(crate) mod writes;
