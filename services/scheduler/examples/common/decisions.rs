//! Durations of the scheduler's decisions, recorded through the metrics of the scheduler.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use metrics::{Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit};

/// Recorded durations. Clones share the same data.
#[derive(Debug, Clone, Default)]
pub(super) struct Decisions(Arc<Seconds>);

#[derive(Debug, Default)]
struct Seconds(Mutex<Vec<f64>>);

impl Decisions {
    /// Starts to record the decisions of this process.
    pub(super) fn record() -> anyhow::Result<Self> {
        let decisions = Self::default();
        metrics::set_global_recorder(decisions.clone())
            .ok()
            .context("cannot install the recorder of metrics")?;
        Ok(decisions)
    }

    /// Returns the 99th percentile since the previous call in milliseconds, and resets the record.
    pub(super) fn take(&self) -> String {
        let mut durations = std::mem::take(&mut *self.0.0.lock().unwrap_or_else(PoisonError::into_inner));
        durations.sort_by(f64::total_cmp);
        durations.get(durations.len() * 99 / 100).map_or("none".to_owned(), |p99| format!("{:.3}", p99 * 1e3))
    }
}

impl HistogramFn for Seconds {
    fn record(&self, value: f64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(value);
    }
}

impl Recorder for Decisions {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        match key.name() {
            "gantry_scheduler_decision_seconds" => Histogram::from_arc(self.0.clone()),
            _ => Histogram::noop(),
        }
    }
}
