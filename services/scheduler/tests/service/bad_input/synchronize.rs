//! RPC `Workers.Synchronize`: invalid first messages and invalid later messages.

use domain::{GatewayInstance, LeaseId, MarkerId};
use prost_reflect::{DynamicMessage, ReflectMessage, Value};
use rpc::Reason::{self, *};
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::synchronize_request::Message as Said;
use testing::bad_input::wrong::*;
use testing::bad_input::{Bad, Call, Expected};

use super::OTHER;
use super::world::World;

pub(super) fn call(world: &World<'_>) -> Call {
    let inputs = vec![pb::InputProgress { name: "in".to_owned(), ..pb::InputProgress::default() }];
    let observed = pb::Observed {
        session_credential: world.two.session_credential.clone(),
        applied_generation: 1,
        leases: vec![pb::ObservedLease {
            lease_id: LeaseId::new().to_string(),
            phase: pb::LeasePhase::Materializing.into(),
            inputs,
        }],
        containers: 3,
        volumes: 4,
        disk_free_bytes: 5,
        number: 1,
    };
    let said = [Said::Registration(world.two.clone()), Said::Observed(observed)];
    Call::new(
        "Workers.Synchronize",
        said.map(|message| pb::SynchronizeRequest { message: Some(message) }),
        [
            out_of_order(),
            within("registration", "registration", registration(world)),
            others(world),
            within("observed", "observed", observed_wrong(world)),
        ],
    )
}

/// Messages in the wrong order and empty messages.
fn out_of_order() -> Vec<Bad> {
    let empty = |message: &mut DynamicMessage| *message = DynamicMessage::new(message.descriptor());
    let mut bad = messages("of nothing", refused("registration"), Vec::clear);
    bad.extend(messages("without a beginning", refused("registration"), |sent| {
        sent.remove(0);
    }));
    bad.extend(messages("that begin with nothing", refused("registration"), move |sent| empty(&mut sent[0])));
    bad.extend(later([
        messages("with another beginning", refused("observed"), |sent| sent[1] = sent[0].clone()),
        messages("with nothing after the beginning", refused("observed"), move |sent| empty(&mut sent[1])),
    ]));
    bad
}

fn refuse(field: &str, what: &str, value: Value, reason: Reason) -> Vec<Bad> {
    change(field, what, value, Expected::Refused(reason, String::new()))
}

/// Invalid variants of the first message of a gateway.
fn registration(world: &World<'_>) -> Vec<Vec<Bad>> {
    let control = |field: &str| invalid(field, "with a control character", text("a\u{1b}b"), field);
    let texts = |field: &str, most: usize| {
        let mut bad = longest(field, most);
        bad.extend(control(field));
        bad.extend(taken(field, "of nothing that is known", text("x".repeat(most))));
        bad
    };
    let absurd = |field: &str, value: Value| taken(&format!("capacity.{field}"), "absurd", value);
    vec![
        named("worker_name", 255),
        control("worker_name"),
        but("worker_name", "of a connected worker", "one", AlreadyAttended),
        but("worker_name", "of another team's worker", "theirs", WorkerOfAnotherTeam),
        id("gateway_instance"),
        but("gateway_instance", "that was superseded", &world.two_before.gateway_instance, StaleSession)
            .into_iter()
            .flat_map(|bad| {
                let before = text(&world.two_before.session_credential);
                given(move |sent| put(sent, "registration.session_credential", Some(&before)), [vec![bad]])
            })
            .collect(),
        malformed("ended_instance"),
        // An invalid credential of a former session is ignored.
        taken("session_credential", "malformed", text("x")),
        taken("session_credential", "overlong", text("x".repeat(100_000))),
        taken("session_credential", "of another worker", text(&world.one.welcome.session_credential)),
        vec![cleared("marker", "marker")],
        id("marker.marker_id"),
        longest("marker.boot_id", 1024),
        named("endpoint", 1024),
        ["x", "http://", "http://a/b", "ftp://a", "unix://a", "http://a:1,http://b:1"]
            .into_iter()
            .flat_map(|endpoint| invalid("endpoint", "malformed", text(endpoint), "endpoint"))
            .collect(),
        vec![cleared("labels", "labels")],
        named("labels.platform", 1024),
        texts("labels.tags", 1024),
        invalid("labels.tags", "of 17 KiB", Value::List(vec![text("x".repeat(1024)); 17]), "labels"),
        malformed_team(),
        but("labels.team", "that the worker is not of", OTHER, WorkerOfAnotherTeam),
        texts("labels.image_kinds", 1024),
        texts("labels.capabilities", 1024),
        within(
            "labels.resource_types",
            "labels.resource_types",
            [named("name", 255), longest("version", 1024)],
        ),
        twice("labels.resource_types", "labels.resource_types.name"),
        taken("labels.ephemeral", "otherwise than before", Value::Bool(true)),
        longest("labels.zone", 1024),
        control("labels.zone"),
        absurd("max_tasks", Value::U32(u32::MAX)),
        absurd("disk_bytes", Value::U64(u64::MAX)),
        absurd("max_containers", Value::U32(u32::MAX)),
        absurd("max_volumes", Value::U32(u32::MAX)),
        absurd("cpu_millis", Value::U64(u64::MAX)),
        absurd("memory_bytes", Value::U64(u64::MAX)),
        absurd("min_free_disk_bytes", Value::U64(u64::MAX)),
        vec![cleared("protocol_versions", "protocol_versions")],
        many("protocol_versions", 101),
    ]
}

/// Malformed names of teams. An empty team is valid and stands for all teams.
fn malformed_team() -> Vec<Bad> {
    let mut bad = team("labels.team");
    bad.remove(0);
    bad
}

/// Connections for other workers, which the scheduler rejects.
fn others(world: &World<'_>) -> Vec<Bad> {
    let sent_by = |registration: &pb::Registration| {
        let (name, marker) =
            (text(&registration.worker_name), registration.marker.clone().expect("a marker"));
        let instance = text(&registration.gateway_instance);
        move |sent: &mut Vec<DynamicMessage>| {
            put(sent, "registration.worker_name", Some(&name));
            put(sent, "registration.gateway_instance", Some(&instance));
            put(sent, "registration.marker.marker_id", Some(&text(&marker.marker_id)));
            put(sent, "registration.marker.boot_id", Some(&text(&marker.boot_id)));
        }
    };
    let versions = Value::List(vec![Value::U32(2)]);
    let unsupported = |what: &str, versions: Value| {
        refuse("registration.protocol_versions", what, versions, UnsupportedProtocol)
    };
    let retired =
        refuse("registration.endpoint", "of a worker that was retired", text("http://a:1"), WorkerRetired);
    let mut bad =
        given(sent_by(&world.old), [unsupported("that the scheduler does not support", versions.clone())]);
    bad.extend(given(sent_by(&world.retired), [retired]));
    bad.extend(given(
        sent_by(&world.theirs),
        [refuse(
            "registration.protocol_versions",
            "that the scheduler does not support, of another team's worker",
            versions.clone(),
            WorkerOfAnotherTeam,
        )],
    ));
    let taken_over = pb::Registration {
        worker_name: "one".to_owned(),
        gateway_instance: GatewayInstance::new().to_string(),
        marker: Some(pb::Marker { marker_id: MarkerId::new().to_string(), boot_id: String::new() }),
        ..pb::Registration::default()
    };
    bad.extend(given(
        sent_by(&taken_over),
        [refuse(
            "registration.protocol_versions",
            "that the scheduler does not support, of a connected worker",
            versions,
            AlreadyAttended,
        )],
    ));
    bad
}

/// Invalid variants of the later messages of a gateway.
fn observed_wrong(world: &World<'_>) -> Vec<Vec<Bad>> {
    let absurd = |field: &str| taken(field, "absurd", Value::U64(u64::MAX));
    vec![later([
        but("session_credential", "missing", "", StaleSession),
        but("session_credential", "malformed", "x", StaleSession),
        but("session_credential", "overlong", "x".repeat(100_000), StaleSession),
        but("session_credential", "of another worker", &world.one.welcome.session_credential, StaleSession),
        but("session_credential", "of a session before", &world.two_before.session_credential, StaleSession),
        absurd("applied_generation"),
        id("leases.lease_id"),
        choice("leases.phase"),
        taken("leases.inputs.name", "with NUL", text("a\0b")),
        absurd("leases.inputs.bytes_done"),
        absurd("leases.inputs.bytes_total"),
        taken("leases.inputs.waits_for", "with NUL", text("a\0b")),
        taken("leases.inputs.relayed", "without bytes", Value::Bool(true)),
        absurd("containers"),
        absurd("volumes"),
        absurd("disk_free_bytes"),
        absurd("number"),
    ])]
}
