//! Tests of streamers with the real services, over gRPC.

mod copies;
mod uploads;
