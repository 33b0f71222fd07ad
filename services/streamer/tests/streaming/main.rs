//! Streamers with the real services beside them, over gRPC.

mod copies;
mod uploads;
