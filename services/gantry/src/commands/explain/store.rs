//! Explanation of objects of the artifact store: why an object is kept or was deleted, and when.

use prost_types::Timestamp;
use rpc::Reason;
use rpc::pb::artifacts::{ExplainResponse, ExplainedState, Keeper, ObjectKind, Relation};
use rpc::pb::scheduler::Worker;

use crate::client::connect::Connection;
use crate::client::queries;
use crate::client::why::{self, LOST_BYTES_REMEDY};
use crate::ending::error::refusal;
use crate::render::json;
use crate::render::labels;
use crate::render::stdout::{print, print_json};
use crate::render::table::{bytes, duration, fields, plain};

/// Maximum length of a line, in characters.
const WIDTH: usize = 1000;

/// Explains an object of the store. The explanation of a worker includes its state in the
/// scheduler.
pub(crate) async fn explain(connection: &Connection, id: &str, as_json: bool) -> anyhow::Result<()> {
    let explained = match why::explain(connection, id).await {
        Ok(explained) => explained,
        Err(error) if refusal(&error).is_some_and(|refused| refused.is(Reason::UnknownId)) => {
            // The worker never held anything, or the store has no record of it any more.
            if queries::worker(connection, "explain", id).await.is_err() {
                return Err(error);
            }
            ExplainResponse { kind: ObjectKind::Worker.into(), id: id.to_owned(), ..Default::default() }
        }
        Err(error) => return Err(error),
    };
    if explained.kind() != ObjectKind::Worker {
        return if as_json { print_json(&json::explained(&explained)) } else { print(&text(&explained)) };
    }
    let worker = queries::worker(connection, "explain", id).await.ok();
    if as_json {
        let mut document = json::explained(&explained);
        document["worker"] = worker.as_ref().map(json::worker).unwrap_or_default();
        return print_json(&document);
    }
    print(&of_worker(&explained, worker.as_ref()))
}

fn of_worker(explained: &ExplainResponse, worker: Option<&Worker>) -> String {
    let state = worker.map(labels::standing);
    let certs = explained.relations.iter().map(related).map(|(_, ids)| ids).collect::<Vec<_>>();
    let contact = worker.and_then(|worker| worker.last_contact_at.as_ref());
    let holds = match explained.label.as_str() {
        "" => "nothing known to the artifact store".to_owned(),
        holds => format!("{}, {}", plain(holds, WIDTH), bytes(explained.size_bytes)),
    };
    fields(&[
        ("worker", explained.id.clone()),
        ("name", worker.map(|worker| plain(&worker.name, WIDTH)).unwrap_or_default()),
        ("state", state.unwrap_or_else(|| "unknown to the scheduler".to_owned())),
        ("gets no work", worker.map(|worker| plain(&labels::no_work(worker), WIDTH)).unwrap_or_default()),
        ("contact", past(contact)),
        ("holds", holds),
        ("certs", certs.join("\n")),
    ])
}

fn text(explained: &ExplainResponse) -> String {
    let thing = labels::thing(explained.kind());
    let mut shown = vec![
        (thing, explained.id.clone()),
        (
            if explained.kind() == ObjectKind::Volume { "for" } else { "label" },
            plain(&explained.label, WIDTH),
        ),
        ("state", state(explained)),
        ("team", explained.team.clone()),
        ("size", labels::size(explained.size_bytes)),
        ("made", past(explained.created_at.as_ref())),
        ("kept by", kept_by(explained)),
    ];
    let because = |when: String| match explained.reason.as_str() {
        _ if when.is_empty() => when,
        "" => when,
        why => format!("{when}: {}", plain(why, WIDTH)),
    };
    shown.push(("marked", because(past(explained.marked_at.as_ref()))));
    // A cache is deleted without being marked.
    let gone = past(explained.gone_at.as_ref());
    shown.push(("deleted", if explained.marked_at.is_none() { because(gone) } else { gone }));
    shown.push(match (explained.kind(), &explained.expires_at) {
        (ObjectKind::Build, Some(at)) if labels::from_now(at).is_none() => {
            ("released", because(past(Some(at))))
        }
        (ObjectKind::Build, Some(at)) => ("releases", because(due(at))),
        (_, Some(at)) => ("expires", because(due(at))),
        (_, None) => ("expires", no_expiry(explained)),
    });
    shown.push(("logged", explained.remembered_until.as_ref().map(until).unwrap_or_default()));
    shown.push(("bytes", location(explained)));
    if !explained.bytes_lost {
        shown.push(("lost", past(explained.lost_at.as_ref())));
    }
    shown.push(("lost because", plain(&explained.loss_reason, WIDTH)));
    if explained.state() == ExplainedState::Orphaned {
        shown.push(("adoptable", labels::yes_or_no(explained.can_be_adopted).to_owned()));
    }
    let relations: Vec<_> = explained.relations.iter().map(related).collect();
    shown.extend(relations.iter().map(|(relation, ids)| (relation.as_str(), ids.clone())));
    let mut text = fields(&shown);
    if explained.can_be_undeleted {
        text.push_str(&format!("\n`gantry undelete {}` restores it.\n", explained.id));
    }
    if explained.state() == ExplainedState::Orphaned {
        text.push_str(&format!("\n{}.\n", why::decide(explained)));
    }
    text
}

/// Describes the place of the bytes of an artifact, if that is not a replica.
fn location(explained: &ExplainResponse) -> String {
    match (explained.in_store, explained.bytes_lost, &explained.lost_at) {
        (true, ..) => labels::IN_STORE.to_owned(),
        (_, true, Some(at)) => {
            format!("lost since {} ({} ago): {LOST_BYTES_REMEDY}", labels::instant(at), labels::ago(Some(at)))
        }
        (_, true, None) => format!("lost: {LOST_BYTES_REMEDY}"),
        _ => String::new(),
    }
}

/// Describes the state of an object.
fn state(explained: &ExplainResponse) -> String {
    let word = labels::explained_state(explained.state());
    let means = match (explained.kind(), explained.state()) {
        (_, ExplainedState::Destroying) => "garbage; its destruction is not requested yet",
        (_, ExplainedState::Sweeping) => {
            "garbage; its destruction is requested from the gateway of its worker"
        }
        (_, ExplainedState::Unconfirmed) => {
            "its worker has a new incarnation, and has not reported its volumes and containers yet"
        }
        (_, ExplainedState::Lost) if !explained.loss_reason.is_empty() => "its bytes are not used any more",
        (_, ExplainedState::Lost) => "its worker does not have it any more",
        (ObjectKind::Artifact, ExplainedState::Deleting)
            if explained.can_be_undeleted && explained.in_store =>
        {
            "garbage; the artifact store still has its bytes"
        }
        (ObjectKind::Artifact, ExplainedState::Deleting) if explained.can_be_undeleted => {
            "garbage; its bytes are still on a worker"
        }
        (ObjectKind::Artifact, ExplainedState::Deleting)
            if explained.relations.iter().any(|one| one.relation == "replicas") =>
        {
            "garbage; its bytes are being destroyed, or cannot be read any more"
        }
        (ObjectKind::Artifact, ExplainedState::Deleting) => "garbage; its bytes are destroyed",
        (ObjectKind::Artifact, ExplainedState::Sealed) if explained.bytes_lost => labels::BYTES_LOST,
        (ObjectKind::Artifact, ExplainedState::Orphaned) => {
            "the store was restored from a backup and does not know it"
        }
        _ => return word,
    };
    format!("{word} ({means})")
}

fn kept_by(explained: &ExplainResponse) -> String {
    let line = |keeper: &Keeper| match &keeper.until {
        Some(at) => format!("{}, {}", plain(&keeper.text, WIDTH), until(at)),
        None => plain(&keeper.text, WIDTH),
    };
    let mut lines: Vec<_> = explained.kept_by.iter().map(line).collect();
    let named = u64::try_from(lines.len()).unwrap_or(u64::MAX);
    if explained.kept_by_total > named {
        lines.push(format!("and {} more", explained.kept_by_total - named));
    }
    lines.join("\n")
}

/// Describes an object without an expiry.
fn no_expiry(explained: &ExplainResponse) -> String {
    if explained.kept_by.is_empty()
        || explained.marked_at.is_some()
        || explained.state() == ExplainedState::Orphaned
    {
        return String::new();
    }
    "never, unless the objects that keep it end".to_owned()
}

/// Formats related objects: the kind of relation, and the ids.
pub(crate) fn related(relation: &Relation) -> (String, String) {
    let thing = labels::thing(relation.kind());
    // The relation `worker` names the kind of object, but `children` and `made from` do not.
    let named = relation.relation.starts_with(thing);
    let line = |id: &String| if named { id.clone() } else { format!("{thing} {id}") };
    let mut lines: Vec<_> = relation.ids.iter().map(line).collect();
    let named = u64::try_from(lines.len()).unwrap_or(u64::MAX);
    if relation.total > named {
        lines.push(format!("and {} more", relation.total - named));
    }
    (relation.relation.clone(), lines.join("\n"))
}

fn past(at: Option<&Timestamp>) -> String {
    at.map(|at| format!("{} ({} ago)", labels::instant(at), labels::ago(Some(at)))).unwrap_or_default()
}

fn due(at: &Timestamp) -> String {
    match labels::from_now(at) {
        Some(left) => format!("{} (in {})", labels::instant(at), duration(left)),
        None => "with the next collection".to_owned(),
    }
}

fn until(at: &Timestamp) -> String {
    match labels::from_now(at) {
        Some(left) => format!("until {} ({} left)", labels::instant(at), duration(left)),
        None => "until the next collection".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG_AGO: Option<Timestamp> = Some(Timestamp { seconds: 0, nanos: 0 });
    const NEVER: Option<Timestamp> = Some(Timestamp { seconds: 253_370_764_800, nanos: 0 });

    fn lines(explained: &ExplainResponse) -> Vec<String> {
        text(explained).lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    }

    #[test]
    fn kept_object_has_keepers_and_expiry() {
        let keeper = |text: &str, until| Keeper { text: text.to_owned(), until, ..Default::default() };
        let mut explained = ExplainResponse {
            kind: ObjectKind::Artifact.into(),
            id: "7".to_owned(),
            state: ExplainedState::Sealed.into(),
            kept_by: vec![keeper("build 8, which goes on", None), keeper("\u{1b}rule", LONG_AGO)],
            kept_by_total: 5,
            in_store: true,
            relations: vec![Relation {
                relation: "replicas".to_owned(),
                kind: ObjectKind::Volume.into(),
                ids: vec!["9".to_owned()],
                total: 3,
            }],
            ..Default::default()
        };
        assert_eq!(
            lines(&explained),
            [
                "artifact: 7",
                "state: sealed",
                "kept by: build 8, which goes on",
                "?rule, until the next collection",
                "and 3 more",
                "expires: never, unless the objects that keep it end",
                "bytes: in the artifact store itself",
                "replicas: volume 9",
                "and 2 more",
            ]
        );
        explained.expires_at = NEVER;
        explained.reason = "it is old".to_owned();
        let expires = lines(&explained).swap_remove(5);
        assert!(
            expires.starts_with("expires: 9999-01-01T00:00:00Z (in ") && expires.ends_with(" d): it is old"),
            "{expires}"
        );
    }

    #[test]
    fn deleted_object_has_reason_and_remedy() {
        let explained = ExplainResponse {
            kind: ObjectKind::Artifact.into(),
            id: "7".to_owned(),
            state: ExplainedState::Deleting.into(),
            marked_at: LONG_AGO,
            reason: "it was old".to_owned(),
            can_be_undeleted: true,
            ..Default::default()
        };
        let lines = lines(&explained);
        assert_eq!(lines[1], "state: deleting (garbage; its bytes are still on a worker)");
        assert!(
            lines[2].starts_with("marked: 1970-01-01T00:00:00Z (") && lines[2].ends_with(" ago): it was old")
        );
        assert_eq!(lines[3..], ["", "`gantry undelete 7` restores it."]);

        let mut explained = ExplainResponse { in_store: true, ..explained };
        let state = |explained: &ExplainResponse| {
            text(explained).lines().nth(1).map(str::to_owned).unwrap_or_default()
        };
        assert!(state(&explained).ends_with("(garbage; the artifact store still has its bytes)"));
        (explained.in_store, explained.can_be_undeleted) = (false, false);
        assert!(state(&explained).ends_with("(garbage; its bytes are destroyed)"));
        let relation = "replicas".to_owned();
        explained.relations = vec![Relation { relation, total: 1, ..Relation::default() }];
        assert!(state(&explained).contains("being destroyed"), "{}", state(&explained));
    }

    #[test]
    fn lost_bytes_have_time_of_loss() {
        let explained = ExplainResponse {
            kind: ObjectKind::Artifact.into(),
            id: "7".to_owned(),
            state: ExplainedState::Sealed.into(),
            bytes_lost: true,
            lost_at: LONG_AGO,
            ..Default::default()
        };
        let lines = lines(&explained);
        assert_eq!(lines[1], "state: sealed (its bytes are lost)");
        assert!(
            lines[2].starts_with("bytes: lost since 1970-01-01T00:00:00Z (")
                && lines[2].ends_with(LOST_BYTES_REMEDY)
        );
        assert_eq!(lines.len(), 3, "{lines:?}");
    }

    #[test]
    fn damaged_volume_is_lost_but_there() {
        let mut explained = ExplainResponse {
            kind: ObjectKind::Volume.into(),
            state: ExplainedState::Lost.into(),
            loss_reason: "is damaged: a file differs".to_owned(),
            ..Default::default()
        };
        let printed = lines(&explained);
        assert!(printed.contains(&"state: lost (its bytes are not used any more)".to_owned()), "{printed:?}");
        assert!(printed.contains(&"lost because: is damaged: a file differs".to_owned()), "{printed:?}");
        explained.loss_reason = String::new();
        let printed = lines(&explained);
        assert!(
            printed.contains(&"state: lost (its worker does not have it any more)".to_owned()),
            "{printed:?}"
        );
    }

    #[test]
    fn orphan_has_remedy() {
        let keeper = Keeper { text: "undecided".to_owned(), ..Default::default() };
        let mut explained = ExplainResponse {
            kind: ObjectKind::Volume.into(),
            id: "7".to_owned(),
            state: ExplainedState::Orphaned.into(),
            team: "main".to_owned(),
            size_bytes: 10,
            kept_by: vec![keeper],
            kept_by_total: 1,
            can_be_adopted: true,
            ..Default::default()
        };
        let printed = lines(&explained);
        for line in ["team: main", "size: 10 B", "adoptable: yes"] {
            assert!(printed.iter().any(|printed| printed == line), "{printed:?}");
        }
        assert!(
            printed
                .last()
                .is_some_and(|hint| hint.contains("`gantry adopt 7`") && hint.contains("`gantry purge 7`"))
        );
        explained.can_be_adopted = false;
        let printed = lines(&explained);
        assert!(
            printed
                .last()
                .is_some_and(|hint| !hint.contains("gantry adopt") && hint.contains("`gantry purge 7`"))
        );
        assert!(!printed.iter().any(|line| line.starts_with("expires")), "{printed:?}");

        explained.kind = ObjectKind::Artifact.into();
        explained.can_be_adopted = true;
        let (relation, ids) = ("volumes".to_owned(), vec!["8".to_owned()]);
        explained.relations = vec![Relation { relation, ids, total: 1, ..Default::default() }];
        assert!(
            why::advice(&explained).ends_with("`gantry adopt 8` restores it"),
            "{}",
            why::advice(&explained)
        );
    }
}
