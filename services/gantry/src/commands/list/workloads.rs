//! Columns of `gantry list workloads`, and fields of each listed object.

use rpc::pb::scheduler::{Access, StopReason, Usage, Workload, WorkloadSpec};

use crate::render::labels;
use crate::render::table::{bytes, count, duration, plain};

pub(super) const WORKLOADS: &[&str] = &["ID", "NAME", "STATE", "END", "WORKER", "AGE", "COMMAND"];

/// Formats a row. A wide row has the whole command.
pub(super) fn workload_row(workload: &Workload, is_wide: bool) -> Vec<String> {
    let command_limit = if is_wide { 1000 } else { 60 };
    let mut state =
        labels::outcome(workload.outcome()).unwrap_or(labels::workload_state(workload.state())).to_owned();
    if workload.stopping() != StopReason::Unspecified {
        state += ", stopping";
    }
    vec![
        workload.workload_id.clone(),
        workload.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default(),
        state,
        labels::end(workload),
        workload.location.as_ref().map(|there| plain(&there.worker_name, 40)).unwrap_or_default(),
        labels::ago(workload.submitted_at.as_ref()),
        plain(&labels::command(workload.spec.as_ref()), command_limit),
    ]
}

/// Text for a workload whose spec is abridged.
const ABRIDGED: &str = "larger than 8 KiB; its arguments, environment, inputs, outputs, caches, tags and capabilities are not stored";

/// Lists the fields of a workload. `standing` describes its worker, if that is not running
/// normally.
pub(super) fn workload_fields(workload: &Workload, standing: &str) -> Vec<(&'static str, String)> {
    let spec = workload.spec.clone().unwrap_or_default();
    let instant = |at: &Option<prost_types::Timestamp>| at.as_ref().map(labels::instant).unwrap_or_default();
    let input = |input: &rpc::pb::scheduler::Input| {
        let read_only = if input.access() == Access::ReadOnly { ", read-only" } else { "" };
        format!("{}: artifact {}{read_only}", plain(&input.name, 255), input.artifact_id)
    };
    let published = |output: &rpc::pb::scheduler::PublishedOutput| {
        format!("{}: artifact {}, {}", plain(&output.name, 255), output.artifact_id, bytes(output.size_bytes))
    };
    let cache = |mount: &rpc::pb::scheduler::CacheMount| {
        let path = String::from_utf8_lossy(&mount.path);
        format!("{}: cache {}", plain(&path, 255), mount.task_cache_id)
    };
    let service = |service: &rpc::pb::scheduler::Service| {
        let essential = if service.essential { ", essential" } else { "" };
        format!("{}: {}{essential}", plain(&service.name, 63), labels::image(service.image.as_ref()))
    };
    let failure = workload.failure.as_ref();
    let mut worker = workload.location.as_ref().map(|there| there.worker_name.clone()).unwrap_or_default();
    if !standing.is_empty() {
        worker += &format!(" ({standing})");
    }
    vec![
        ("id", workload.workload_id.clone()),
        ("name", spec.name.clone()),
        ("state", labels::workload_state(workload.state()).to_owned()),
        ("stopping", labels::stop_reason(workload.stopping()).to_owned()),
        ("waiting for", workload.waiting_for.join("\n")),
        ("outcome", labels::outcome(workload.outcome()).unwrap_or_default().to_owned()),
        ("end", labels::end(workload)),
        ("failure", failure.map(|failure| plain(&failure.message, 1000)).unwrap_or_default()),
        ("command", plain(&labels::command(Some(&spec)), 1000)),
        ("spec", if workload.abridged { ABRIDGED.to_owned() } else { String::new() }),
        ("image", plain(&labels::image(spec.image.as_ref()), 1024)),
        ("kind", labels::kind(spec.kind()).to_owned()),
        ("platform", plain(&spec.platform, 100)),
        ("only worker", plain(&spec.worker, 255)),
        ("tags", plain(&spec.tags.join(" "), 1000)),
        ("reserves", spec.requests.as_ref().map(labels::amounts).unwrap_or_default()),
        ("priority", if spec.priority == 0 { String::new() } else { spec.priority.to_string() }),
        ("time limits", time_limits(&spec)),
        ("interruptible", if spec.interruptible { "yes".to_owned() } else { String::new() }),
        ("inputs", spec.inputs.iter().map(input).collect::<Vec<_>>().join("\n")),
        ("caches", spec.caches.iter().map(cache).collect::<Vec<_>>().join("\n")),
        ("outputs", workload.outputs.iter().map(published).collect::<Vec<_>>().join("\n")),
        ("result", workload.result.as_ref().map(|kept| bytes(kept.len() as u64)).unwrap_or_default()),
        ("services", spec.services.iter().map(service).collect::<Vec<_>>().join("\n")),
        ("notes", workload.notes.iter().map(|note| plain(note, 1000)).collect::<Vec<_>>().join("\n")),
        ("worker", worker),
        ("attempt", workload.location.as_ref().map(|there| there.attempt_id.clone()).unwrap_or_default()),
        ("build", spec.build_id),
        ("submitted", instant(&workload.submitted_at)),
        ("started", instant(&workload.started_at)),
        ("finished", instant(&workload.finished_at)),
        ("retries", retries(workload.retried, spec.retries)),
        ("durations", workload.usage.as_ref().map(usage_times).unwrap_or_default()),
        ("usage", workload.usage.as_ref().map(used).unwrap_or_default()),
    ]
}

/// Formats the time limits of a workload.
fn time_limits(spec: &WorkloadSpec) -> String {
    let limits = [
        ("in the queue", spec.queue_timeout),
        ("until it starts", spec.start_timeout),
        ("running", spec.run_timeout),
    ];
    let limited = limits.into_iter().filter_map(|(what, time)| Some(format!("{} {what}", self::time(time?))));
    limited.collect::<Vec<_>>().join(", ")
}

/// Formats the number of retries and its limit.
fn retries(retried: u32, retries: u32) -> String {
    match (retried, retries) {
        (0, 0) => String::new(),
        (retried, 0) => count(retried.into(), "time"),
        (retried, retries) => format!("{}, at most {retries}", count(retried.into(), "time")),
    }
}

/// Formats the known durations of the last attempt.
fn usage_times(usage: &Usage) -> String {
    let known = [("waited", usage.queued), ("prepared", usage.preparing), ("ran", usage.running)];
    let known = known.into_iter().filter_map(|(what, time)| Some(format!("{what} {}", self::time(time?))));
    known.collect::<Vec<_>>().join(", ")
}

/// Formats the known resource usage of the last attempt.
fn used(usage: &Usage) -> String {
    let known = [
        usage.cpu_time.map(|used| format!("{} of CPU", time(used))),
        usage.peak_memory_bytes.map(|most| format!("{} peak memory", bytes(most))),
        usage.bytes_in.map(|brought| format!("{} of inputs copied", bytes(brought))),
        usage.bytes_out.map(|published| format!("{} of outputs published", bytes(published))),
    ];
    known.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn time(time: prost_types::Duration) -> String {
    duration(time.try_into().unwrap_or_default())
}
