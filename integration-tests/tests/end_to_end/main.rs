//! End-to-end tests. Each test has a separate cluster, and tests run in parallel.
//!
//! Slow tests that rarely fail are ignored by default. `make full` runs them.

mod at_home;
mod caches;
mod client_docs;
mod closed_output;
mod completion;
mod concourse_worker;
mod cordoned;
mod driven;
mod driven_model;
mod endings;
mod examples;
mod exec;
mod four;
mod images;
mod json_schema;
mod life;
mod lost_inputs;
mod main_job;
mod mixed;
mod ordinary_user;
mod other_builds;
mod otlp;
mod patience;
mod pipeline;
mod proxy;
mod prune;
mod references;
mod refusals;
mod registries;
mod resources;
mod restored;
mod results;
mod screens;
mod services;
mod several_workers;
mod silent;
mod standby;
mod thousand;
mod top;
mod transfers;
mod usage;
mod waiting;
mod why;
mod words;
