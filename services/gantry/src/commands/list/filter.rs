//! Keys of `--filter`, for each kind of objects.

use anyhow::anyhow;
use rpc::Reason;

use crate::cli::args::Kind;
use crate::client::connect::Connection;
use crate::client::queries;
use crate::ending::error::refusal;
use crate::render::filter::Filter;

/// Key of a filter, and the fields of the JSON document that it compares.
type Key = (&'static str, &'static [&'static str]);

/// Key whose value is the name or id of a worker.
const WORKER: &str = "worker";
/// Keys whose values are beginnings.
const BEGINNINGS: [&str; 2] = ["label", "name"];

fn keys(kind: Kind) -> &'static [Key] {
    const STATE: Key = ("state", &["state"]);
    const ON_WORKER: Key = (WORKER, &["worker_id"]);
    match kind {
        Kind::Workers => &[
            STATE,
            ("name", &["name"]),
            ("platform", &["labels.platform"]),
            ("tag", &["labels.tags"]),
            ("team", &["labels.team"]),
            ("zone", &["labels.zone"]),
        ],
        Kind::Workloads => &[
            ("state", &["state", "outcome"]),
            ("name", &["spec.name"]),
            (WORKER, &["location.worker_id", "location.worker_name"]),
            ("build", &["spec.build_id"]),
            ("kind", &["spec.kind"]),
        ],
        Kind::Leases => &[STATE, (WORKER, &["worker_id", "worker_name"]), ("team", &["team"])],
        Kind::Images => &[("name", &["image"]), ("platform", &["platform"])],
        Kind::Artifacts => &[STATE, ("label", &["label"]), (WORKER, &["replicas.worker_id"])],
        Kind::Volumes => &[STATE, ON_WORKER, ("for", &["purpose"]), ("artifact", &["artifact_id"])],
        Kind::Containers => &[STATE, ON_WORKER, ("workload", &["workload_id"])],
        Kind::Caches => &[("name", &["name"]), ("job", &["job"])],
        Kind::BaseTypes => &[("name", &["type"]), ON_WORKER],
        Kind::Imports => &[STATE, ("name", &["resource_type"]), ON_WORKER],
    }
}

/// Makes the filters of a list from pairs of a key and a value.
pub(super) async fn filters(
    connection: &Connection,
    kind: Kind,
    given: &[(String, String)],
) -> anyhow::Result<Vec<Filter>> {
    let mut filters = Vec::new();
    for (key, value) in given {
        let fields = fields(kind, key)?;
        let mut values = vec![value.clone()];
        if key == WORKER {
            match queries::worker(connection, "find", value).await {
                Ok(worker) => values.push(worker.worker_id),
                // The worker was removed.
                Err(error) if refusal(&error).is_some_and(|it| it.is(Reason::WorkerNotFound)) => {}
                Err(error) => return Err(error),
            }
        }
        filters.push(Filter { fields, values, by_beginning: BEGINNINGS.contains(&key.as_str()) });
    }
    Ok(filters)
}

fn fields(kind: Kind, key: &str) -> anyhow::Result<&'static [&'static str]> {
    let keys = keys(kind);
    let known = keys.iter().find(|(name, _)| *name == key).map(|(_, fields)| *fields);
    known.ok_or_else(|| {
        let names: Vec<_> = keys.iter().map(|(name, _)| *name).collect();
        anyhow!("cannot filter by {key:?}: the filters of this list are {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_key_is_rejected_with_known_ones() {
        assert_eq!(fields(Kind::Workloads, "build").expect("known"), ["spec.build_id"]);
        assert_eq!(
            fields(Kind::Images, "state").expect_err("refused").to_string(),
            "cannot filter by \"state\": the filters of this list are name, platform"
        );
    }
}
