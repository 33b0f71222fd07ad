//! `gantry explain` of what the artifact store knows, and `gantry undelete`: why something is there, or went, and how it comes back.

use prost_types::Timestamp;
use rpc::pb::artifacts::{
    Artifact, ExplainRequest, ExplainResponse, Keeper, Relation, Thing, UndeleteRequest, undelete_request,
};

use crate::args::UndeleteArgs;
use crate::connect::{Connection, repeat};
use crate::json;
use crate::stdout::{print, print_json};
use crate::table::{bytes, count, duration, fields, plain};
use crate::words;

/// How long a line is at most.
const WIDTH: usize = 200;

/// Explains an artifact, volume, container, build, workload, attempt, cache or base resource type.
pub(crate) async fn explain(connection: &Connection, id: &str, as_json: bool) -> anyhow::Result<()> {
    let request = ExplainRequest { team: connection.team.clone(), id: id.to_owned() };
    let client = connection.artifacts();
    let explained =
        repeat("cannot explain it", async || client.clone().explain(request.clone()).await).await?;
    if as_json { print_json(&json::explained(&explained)) } else { print(&text(&explained)) }
}

fn text(explained: &ExplainResponse) -> String {
    let thing = words::thing(explained.thing());
    let mut shown = vec![
        (thing, explained.id.clone()),
        (if explained.thing() == Thing::Volume { "for" } else { "label" }, plain(&explained.label, WIDTH)),
        ("state", state(explained)),
        ("size", words::size(explained.size_bytes)),
        ("made", past(explained.created_at.as_ref())),
        ("kept by", kept_by(explained)),
    ];
    let because = |when: String| match explained.why.as_str() {
        _ if when.is_empty() => when,
        "" => when,
        why => format!("{when}: {}", plain(why, WIDTH)),
    };
    shown.push(("marked", because(past(explained.marked_at.as_ref()))));
    shown.push(("gone", past(explained.gone_at.as_ref())));
    shown.push(match (explained.thing(), &explained.goes_at) {
        (Thing::Build, Some(at)) if words::from_now(at).is_none() => ("let go", because(past(Some(at)))),
        (Thing::Build, Some(at)) => ("lets go", because(due(at))),
        (_, Some(at)) => ("goes", because(due(at))),
        (_, None) => ("goes", endless(explained)),
    });
    shown.push(("remembered", explained.remembered_until.as_ref().map(until).unwrap_or_default()));
    shown.push(("bytes", if explained.in_store { words::IN_STORE.to_owned() } else { String::new() }));
    let relations: Vec<_> = explained.relations.iter().map(related).collect();
    shown.extend(relations.iter().map(|(relation, ids)| (relation.as_str(), ids.clone())));
    let mut text = fields(&shown);
    if explained.can_be_undeleted {
        text.push_str(&format!("\n`gantry undelete {}` brings it back.\n", explained.id));
    }
    text
}

/// The state, with what it means where the word does not say it.
fn state(explained: &ExplainResponse) -> String {
    let means = match (explained.thing(), explained.state.as_str()) {
        (_, "destroying") => "garbage; its worker's gateway was not told to destroy it yet",
        (_, "sweeping") => "garbage; its worker's gateway was told to destroy it",
        (_, "unconfirmed") => "its worker has begun another life, and has not said yet what is left",
        (_, "lost") => "its worker does not have it any more",
        (Thing::Artifact, "deleting") => "garbage; its bytes are destroyed",
        _ => return explained.state.clone(),
    };
    format!("{} ({means})", explained.state)
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

/// What stays until something happens to what keeps it.
fn endless(explained: &ExplainResponse) -> String {
    if explained.kept_by.is_empty() || explained.marked_at.is_some() {
        return String::new();
    }
    "not before something happens to what keeps it".to_owned()
}

/// Things that it has to do with: what they are to it, and which.
fn related(relation: &Relation) -> (String, String) {
    let thing = words::thing(relation.thing());
    // `children` and `made from` do not say what they are; `worker` does.
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
    at.map(|at| format!("{} ({} ago)", words::instant(at), words::ago(Some(at)))).unwrap_or_default()
}

fn due(at: &Timestamp) -> String {
    match words::from_now(at) {
        Some(left) => format!("{} (in {})", words::instant(at), duration(left)),
        None => "with the next collection".to_owned(),
    }
}

fn until(at: &Timestamp) -> String {
    match words::from_now(at) {
        Some(left) => format!("until {} ({} left)", words::instant(at), duration(left)),
        None => "until the next collection".to_owned(),
    }
}

/// `gantry undelete`
pub(crate) async fn undelete(
    connection: &Connection,
    args: &UndeleteArgs,
    as_json: bool,
) -> anyhow::Result<()> {
    let request = UndeleteRequest {
        team: connection.team.clone(),
        artifact_id: args.artifact.to_string(),
        kept_by: Some(undelete_request::KeptBy::Keep(rpc::duration(args.keep))),
    };
    let client = connection.artifacts();
    let doing = format!("cannot bring artifact {} back", args.artifact);
    let response = repeat(&doing, async || client.clone().undelete(request.clone()).await).await?;
    let artifact = response.artifact.unwrap_or_default();
    if as_json {
        return print_json(&json::artifact(&artifact));
    }
    print(&back(&artifact, args))
}

fn back(artifact: &Artifact, args: &UndeleteArgs) -> String {
    let replicas = u64::try_from(artifact.replicas.len()).unwrap_or(u64::MAX);
    let whereabouts = match (artifact.in_store, replicas) {
        (true, 0) => words::IN_STORE.to_owned(),
        (true, replicas) => format!("{} and on {}", words::IN_STORE, count(replicas, "worker")),
        (false, replicas) => format!("on {}", count(replicas, "worker")),
    };
    format!(
        "artifact {} is there: {} {whereabouts}, kept for {} at least\n",
        artifact.artifact_id,
        bytes(artifact.size_bytes),
        duration(args.keep)
    )
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
    fn what_is_kept_says_by_what_and_until_when() {
        let keeper = |text: &str, until| Keeper { text: text.to_owned(), until, ..Default::default() };
        let mut explained = ExplainResponse {
            thing: Thing::Artifact.into(),
            id: "7".to_owned(),
            state: "sealed".to_owned(),
            kept_by: vec![keeper("build 8, which goes on", None), keeper("\u{1b}nobody", LONG_AGO)],
            kept_by_total: 5,
            in_store: true,
            relations: vec![Relation {
                relation: "replicas".to_owned(),
                thing: Thing::Volume.into(),
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
                "?nobody, until the next collection",
                "and 3 more",
                "goes: not before something happens to what keeps it",
                "bytes: in the artifact store itself",
                "replicas: volume 9",
                "and 2 more",
            ]
        );
        explained.goes_at = NEVER;
        explained.why = "it is old".to_owned();
        let goes = lines(&explained).swap_remove(5);
        assert!(
            goes.starts_with("goes: 9999-01-01T00:00:00Z (in ") && goes.ends_with(" d): it is old"),
            "{goes}"
        );
    }

    #[test]
    fn what_went_says_when_and_why_and_how_it_comes_back() {
        let explained = ExplainResponse {
            thing: Thing::Artifact.into(),
            id: "7".to_owned(),
            state: "deleting".to_owned(),
            marked_at: LONG_AGO,
            why: "it was old".to_owned(),
            can_be_undeleted: true,
            ..Default::default()
        };
        let lines = lines(&explained);
        assert_eq!(lines[1], "state: deleting (garbage; its bytes are destroyed)");
        assert!(
            lines[2].starts_with("marked: 1970-01-01T00:00:00Z (") && lines[2].ends_with(" ago): it was old")
        );
        assert_eq!(lines[3..], ["", "`gantry undelete 7` brings it back."]);
    }
}
