//! Bars for the inputs that arrive on a worker.

use std::collections::BTreeMap;

use rpc::pb::scheduler::InputProgress;

use crate::render::progress::{Bar, Progress};
use crate::render::ui::Ui;

/// One bar per input. They are removed when this is dropped.
pub(super) struct InputBars {
    progress: Progress,
    bars: BTreeMap<String, Bar>,
}

impl InputBars {
    pub(super) fn start(ui: &Ui) -> Self {
        Self { progress: ui.progress(), bars: BTreeMap::new() }
    }

    /// Shows the inputs that are not on the worker yet.
    pub(super) fn show(&mut self, inputs: &[InputProgress]) {
        self.bars.retain(|name, _| inputs.iter().any(|input| input.name == *name));
        for InputProgress { name, bytes_done, bytes_total, .. } in inputs {
            let start = || self.progress.bar("copying to the worker:", name);
            let bar = self.bars.entry(name.clone()).or_insert_with(start);
            bar.expect(*bytes_total);
            bar.reach(*bytes_done);
        }
    }
}
