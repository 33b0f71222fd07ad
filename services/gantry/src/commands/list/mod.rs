//! `gantry list` and `gantry show`: objects of a cluster, as tables, fields or JSON.

mod artifacts;
mod base_types;
mod caches;
mod containers;
mod filter;
mod images;
mod imports;
mod leases;
mod names;
mod orphans;
#[cfg(test)]
mod schema_tests;
mod volumes;
mod workers;
mod workloads;

use anyhow::bail;
use futures::{StreamExt, TryStreamExt};
use rpc::pb::artifacts::{Container, InventoryState, Volume};
use rpc::pb::scheduler::{Outcome, Workload, WorkloadState};
use serde_json::{Value, json};

use self::artifacts::{ARTIFACTS, artifact_fields, artifact_row};
use self::containers::{CONTAINERS, container_fields, container_row};
use self::names::Names;
use self::volumes::{VOLUMES, volume_fields, volume_row};
use self::workers::{WORKERS, worker_fields, worker_row};
use self::workloads::{WORKLOADS, workload_fields, workload_row};
use crate::cli::args::{InspectArgs, Kind, ListArgs, PsArgs, ShowArgs};
use crate::client::connect::Connection;
use crate::client::images::{Content, content};
use crate::client::queries::{self, WorkloadFilter};
use crate::client::references::{self, known};
use crate::client::why;
use crate::render::json;
use crate::render::labels;
use crate::render::listing::{Format, Listing, abbreviate, fitted, one};
use crate::render::stdout::{print, print_json};
use crate::render::ui::Ui;

/// Number of workloads in the overview.
const OVERVIEW_LIMIT: usize = 20;

/// Executes `gantry list`.
pub(crate) async fn list(connection: &Connection, args: &ListArgs, as_json: bool) -> anyhow::Result<()> {
    let listing = args.format.listing(args.limit, as_json);
    let Some(kind) = args.kind else { return overview(connection, listing.is_json()).await };
    let given = &args.format.filter;
    let listing = listing.with_filters(filter::filters(connection, kind, given).await?);
    let wanted = args.state.as_deref();
    // The service filters by one state, and the command by the others.
    let narrowed = wanted.or_else(|| filtered_state(given));
    match kind {
        Kind::Workers => {
            no_state("workers", wanted)?;
            listing.print(queries::workers(connection), json::worker, WORKERS, worker_row).await
        }
        Kind::Workloads => {
            let (state, outcome) = narrowed.map(workload_state).transpose()?.unwrap_or_default();
            let filter = WorkloadFilter { state, outcome, unfinished: false };
            workloads(connection, filter, listing).await
        }
        Kind::Leases => {
            no_state("leases", wanted)?;
            leases::list(connection, args.worker.as_deref(), listing).await
        }
        Kind::BaseTypes => {
            no_state("base types", wanted)?;
            base_types::list(connection, listing).await
        }
        Kind::Imports => {
            no_state("imports", wanted)?;
            imports::list(connection, listing).await
        }
        Kind::Images => {
            no_state("images", wanted)?;
            images::list(connection, listing).await
        }
        kind if args.orphans => orphans::list(connection, kind, listing).await,
        Kind::Artifacts if args.at_risk => {
            let at_risk = queries::at_risk(connection, queries::unreliable_workers(connection).await?);
            listing.short().print(at_risk, json::artifact, ARTIFACTS, artifact_row).await
        }
        Kind::Artifacts => {
            let artifacts =
                queries::artifacts(connection, state("artifacts", narrowed, labels::artifact_state)?);
            listing.short().print(artifacts, json::artifact, ARTIFACTS, artifact_row).await
        }
        Kind::Volumes => {
            let volumes = queries::volumes(connection, state("volumes", narrowed, labels::inventory_state)?);
            let names = Names::ask(connection, listing.is_json()).await;
            let row = |volume: &Volume| volume_row(volume, &names);
            listing.short().print(volumes, json::volume, VOLUMES, row).await
        }
        Kind::Containers => {
            let containers =
                queries::containers(connection, state("containers", narrowed, labels::inventory_state)?);
            let names = Names::ask(connection, listing.is_json()).await;
            let row = |container: &Container| container_row(container, &names);
            listing.short().print(containers, json::container, CONTAINERS, row).await
        }
        Kind::Caches => {
            if wanted.is_some() {
                bail!("--state cannot be used with caches");
            }
            caches::list(connection, listing).await
        }
    }
}

/// Executes `gantry images`.
pub(crate) async fn images(connection: &Connection, as_json: bool) -> anyhow::Result<()> {
    let format = if as_json { Format::Json } else { Format::Table };
    images::list(connection, Listing::new(usize::MAX, format)).await
}

/// Executes `gantry ps`. With `only_ids`, prints the ids alone.
pub(crate) async fn ps(
    connection: &Connection,
    args: &PsArgs,
    only_ids: bool,
    as_json: bool,
) -> anyhow::Result<()> {
    let listing = match args.format.listing(args.limit, as_json) {
        listing if only_ids && !listing.is_json() => Listing::new(args.limit, Format::Ids),
        listing => listing,
    };
    let given = &args.format.filter;
    let listing = listing.with_filters(filter::filters(connection, Kind::Workloads, given).await?);
    let wanted = filtered_state(given);
    let (state, outcome) = wanted.map(workload_state).transpose()?.unwrap_or_default();
    let filter = WorkloadFilter { state, outcome, unfinished: !args.all && wanted.is_none() };
    workloads(connection, filter, listing).await
}

async fn workloads(connection: &Connection, filter: WorkloadFilter, listing: Listing) -> anyhow::Result<()> {
    let is_wide = listing.is_wide();
    let row = |workload: &Workload| workload_row(workload, is_wide);
    listing.short().print(queries::workloads(connection, filter), json::workload, WORKLOADS, row).await
}

/// Prints the workers, and the newest workloads that have not ended.
async fn overview(connection: &Connection, as_json: bool) -> anyhow::Result<()> {
    let workers: Vec<_> = queries::workers(connection).try_collect().await?;
    let filter = WorkloadFilter { unfinished: true, ..WorkloadFilter::default() };
    let workloads = queries::workloads(connection, filter).take(OVERVIEW_LIMIT + 1);
    let mut workloads: Vec<_> = workloads.try_collect().await?;
    let more = workloads.len() > OVERVIEW_LIMIT;
    workloads.truncate(OVERVIEW_LIMIT);
    if as_json {
        let workers: Vec<_> = workers.iter().map(json::worker).collect();
        let workloads: Vec<_> = workloads.iter().map(json::workload).collect();
        return print_json(&json!({ "workers": workers, "workloads": workloads, "truncated": more }));
    }
    let mut rows: Vec<_> = workloads.iter().map(|workload| workload_row(workload, false)).collect();
    abbreviate(&mut rows, 0);
    let mut text = fitted(WORKERS, workers.iter().map(worker_row).collect());
    text.push('\n');
    text.push_str(&match (rows.is_empty(), more) {
        (true, _) => "no workload waits or runs; `gantry ps -a` lists those that have ended\n".to_owned(),
        (false, true) => fitted(WORKLOADS, rows) + "… `gantry ps` lists all that wait or run\n",
        (false, false) => fitted(WORKLOADS, rows),
    });
    text.push_str(
        "\nOther lists: gantry list workloads|images|artifacts|caches|leases|volumes|\n             containers|base-types|imports\n",
    );
    print(&text)
}

/// Returns the first state among the filters.
fn filtered_state(filters: &[(String, String)]) -> Option<&str> {
    filters.iter().find(|(key, _)| key == "state").map(|(_, state)| state.as_str())
}

fn no_state(kind: &str, wanted: Option<&str>) -> anyhow::Result<()> {
    if wanted.is_some() {
        bail!("--state cannot be used with {kind}");
    }
    Ok(())
}

/// Parses the value of `--state`. 0: any state.
fn state<S: TryFrom<i32>>(
    kind: &str,
    wanted: Option<&str>,
    word: fn(S) -> &'static str,
) -> anyhow::Result<i32> {
    let Some(wanted) = wanted else { return Ok(0) };
    // Numbers begin at 1 and have no gaps.
    let states = (1..).map_while(|number| S::try_from(number).ok().map(|state| (number, word(state))));
    let states: Vec<_> = states.collect();
    match states.iter().find(|(_, word)| *word == wanted) {
        Some((number, _)) => Ok(*number),
        None => {
            let words: Vec<_> = states.iter().map(|(_, word)| *word).collect();
            bail!("{wanted:?} is not a state of {kind}; the states are {}", words.join(", "))
        }
    }
}

/// Parses the value of `--state` for workloads: a state or an outcome.
fn workload_state(wanted: &str) -> anyhow::Result<(WorkloadState, Outcome)> {
    let states = (1..).map_while(|number| WorkloadState::try_from(number).ok());
    let outcomes = (1..).map_while(|number| Outcome::try_from(number).ok());
    let of_state = states.map(|state| (labels::workload_state(state), (state, Outcome::Unspecified)));
    let of_outcome = outcomes
        .filter_map(|outcome| Some((labels::outcome(outcome)?, (WorkloadState::Unspecified, outcome))));
    let all: Vec<_> = of_state.chain(of_outcome).collect();
    match all.iter().find(|(word, _)| *word == wanted) {
        Some((_, which)) => Ok(*which),
        None => {
            let words: Vec<_> = all.iter().map(|(word, _)| *word).collect();
            bail!("{wanted:?} is not a state of workloads; the states are {}", words.join(", "))
        }
    }
}

/// Executes `gantry show`.
pub(crate) async fn show(
    connection: &Connection,
    ui: &Ui,
    args: &ShowArgs,
    as_json: bool,
) -> anyhow::Result<()> {
    let id = &args.id;
    match args.kind {
        Kind::Workers => {
            one(&queries::worker(connection, "show", id).await?, as_json, json::worker, worker_fields)
        }
        Kind::Workloads => {
            let workload = queries::workload(connection, "show", id).await?;
            let standing =
                if as_json { String::new() } else { queries::standing(connection, &workload).await? };
            one(&workload, as_json, json::workload, |workload| workload_fields(workload, &standing))
        }
        Kind::Artifacts => {
            let id = &references::artifact_id(connection, "show", id).await?.to_string();
            let shown = why::or_why(connection, id, queries::artifact(connection, id).await).await?;
            one(&shown, as_json, json::artifact, artifact_fields)
        }
        Kind::Volumes => {
            let id = &references::volume_handle(connection, "show", id).await?;
            let shown = why::or_why(connection, id, queries::volume(connection, id).await).await?;
            let loss_reason = match shown.state() {
                InventoryState::Lost if !as_json => why::explain(connection, id)
                    .await
                    .map(|explained| explained.loss_reason)
                    .unwrap_or_default(),
                _ => String::new(),
            };
            one(&shown, as_json, json::volume, |volume| volume_fields(volume, &loss_reason))
        }
        Kind::Containers => {
            let id = &references::container_handle(connection, "show", id).await?;
            let shown = why::or_why(connection, id, queries::container(connection, id).await).await?;
            one(&shown, as_json, json::container, container_fields)
        }
        Kind::Images => images::show(connection, ui, id, as_json).await,
        Kind::Caches => one(&caches::find(connection, id).await?, as_json, caches::json, caches::shown),
        Kind::BaseTypes | Kind::Imports | Kind::Leases => {
            bail!("`gantry list` shows everything about objects of this kind; see also `gantry explain {id}`")
        }
    }
}

/// Executes `gantry inspect`: prints objects as JSON, of whichever kind they are.
pub(crate) async fn inspect(connection: &Connection, ui: &Ui, args: &InspectArgs) -> anyhow::Result<()> {
    for reference in &args.references {
        print_json(&inspected(connection, ui, reference).await?)?;
    }
    Ok(())
}

async fn inspected(connection: &Connection, ui: &Ui, reference: &str) -> anyhow::Result<Value> {
    let doing = "inspect";
    if let Some(workload) = known(queries::workload(connection, doing, reference).await)? {
        return Ok(json::workload(&workload));
    }
    let mut advice = "see `gantry list`".to_owned();
    match content(connection, doing, reference).await? {
        Ok(Content::Artifact(id)) => {
            if let Some(artifact) = known(queries::artifact(connection, &id.to_string()).await)? {
                return Ok(json::artifact(&artifact));
            }
        }
        Ok(Content::Images(mut images)) => return images::inspected(connection, ui, images.remove(0)).await,
        Err(none) => advice = none.advice(&advice),
    }
    if let Some(worker) = known(queries::worker(connection, doing, reference).await)? {
        return Ok(json::worker(&worker));
    }
    if let Some(handle) = known(references::volume_handle(connection, doing, reference).await)?
        && let Some(volume) = known(queries::volume(connection, &handle).await)?
    {
        return Ok(json::volume(&volume));
    }
    if let Some(handle) = known(references::container_handle(connection, doing, reference).await)?
        && let Some(container) = known(queries::container(connection, &handle).await)?
    {
        return Ok(json::container(&container));
    }
    bail!(
        "cannot inspect {reference}: no workload, artifact, image, worker, volume or container has this name, or an id \
         that begins with it; {advice}"
    )
}

#[cfg(test)]
mod tests {
    use rpc::pb::artifacts::{Artifact, ArtifactState};
    use rpc::pb::scheduler::Worker;

    use super::*;

    #[test]
    fn states_are_parsed_by_their_words() {
        let of = |wanted| state("artifacts", wanted, labels::artifact_state);
        assert_eq!(of(None).expect("any"), 0);
        assert_eq!(of(Some("deleting")).expect("a state"), 3);
        let refused = of(Some("unknown")).expect_err("none");
        assert_eq!(
            refused.to_string(),
            "\"unknown\" is not a state of artifacts; the states are open, sealed, deleting"
        );
    }

    #[test]
    fn sealed_artifact_without_bytes_is_lost() {
        let bytes = |artifact: &Artifact| {
            artifact_fields(artifact).into_iter().find(|(name, _)| *name == "bytes").expect("the field").1
        };
        let mut artifact = Artifact { state: ArtifactState::Sealed.into(), ..Artifact::default() };
        assert!(bytes(&artifact).starts_with("lost: produce the artifact again"), "{}", bytes(&artifact));
        artifact.in_store = true;
        assert_eq!(bytes(&artifact), labels::IN_STORE);
        artifact = Artifact { state: ArtifactState::Open.into(), ..Artifact::default() };
        assert_eq!(bytes(&artifact), "");
    }

    #[test]
    fn rows_have_columns_of_their_tables() {
        assert_eq!(worker_row(&Worker::default()).len(), WORKERS.len());
        assert_eq!(workload_row(&Workload::default(), false).len(), WORKLOADS.len());
        assert_eq!(artifact_row(&Artifact::default()).len(), ARTIFACTS.len());
        let names = Names::default();
        assert_eq!(volume_row(&Volume::default(), &names).len(), VOLUMES.len());
        assert_eq!(container_row(&Container::default(), &names).len(), CONTAINERS.len());
    }

    #[test]
    fn rows_name_their_worker() {
        let names = Names::from([("id-1", "one")]);
        let volume = |id: &str| Volume { worker_id: id.to_owned(), ..Volume::default() };
        let container = Container { worker_id: "id-1".to_owned(), ..Container::default() };
        let at = VOLUMES.iter().position(|header| *header == "WORKER").expect("a column");
        assert_eq!(volume_row(&volume("id-1"), &names)[at], "one");
        assert_eq!(volume_row(&volume("id-2"), &names)[at], "id-2", "the worker is unknown");
        let at = CONTAINERS.iter().position(|header| *header == "WORKER").expect("a column");
        assert_eq!(container_row(&container, &names)[at], "one");
    }
}
