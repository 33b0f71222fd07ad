//! The suite as its users meet it. Each test has a cluster of its own, and they run side by side.
//!
//! Tests that take minutes and rarely fail are ignored; `make full` runs them.

mod caches;
mod client_docs;
mod closed_output;
mod concourse_worker;
mod cordoned;
mod endings;
mod examples;
mod four;
mod images;
mod life;
mod main_job;
mod mixed;
mod other_builds;
mod otlp;
mod pipeline;
mod proxy;
mod refusals;
mod restored;
mod results;
mod several_workers;
mod silent;
mod standby;
mod thousand;
mod transfers;
mod usage;
mod waiting;
mod why;
mod words;
