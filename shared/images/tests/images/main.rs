//! Tests of images against independent tools.

mod umoci;
