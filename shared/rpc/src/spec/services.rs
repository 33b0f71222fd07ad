//! Validation and conversion of the services of a spec.

use std::collections::HashSet;
use std::time::Duration;

use domain::workload::{Bytes, Image, Readiness, ReadinessCheck, Service};
use tonic::Status;

use super::{
    check_limits, directory_to_proto, environment_to_proto, has_defaults, image_to_proto, limits_to_proto,
    parse_command, parse_directory, parse_environment, parse_image, parse_limits,
};
use crate::pb::scheduler as pb;
use crate::{check_label, duration, invalid_field, parse_duration};

/// Maximum number of services in a spec.
const MAX_SERVICES: usize = 16;
/// Maximum length of the name of a service, in bytes, as for a label of a host name.
const MAX_NAME_BYTES: usize = 63;
/// Default maximum time until a service is ready.
const DEFAULT_READINESS_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum of this time.
const MAX_READINESS_TIMEOUT: Duration = Duration::from_secs(60 * 60);

/// Checks the sizes and limits of submitted services.
pub(super) fn check(services: &[pb::Service]) -> Result<(), Status> {
    if services.len() > MAX_SERVICES {
        return Err(invalid_field("spec.services", format!("must be at most {MAX_SERVICES}")));
    }
    for (index, service) in services.iter().enumerate() {
        let field = format!("spec.services[{index}]");
        check_label(&format!("{field}.user"), &service.user)?;
        check_limits(&format!("{field}.limits"), &service.limits.unwrap_or_default())?;
    }
    Ok(())
}

pub(super) fn parse(services: Vec<pb::Service>) -> Result<Vec<Service>, Status> {
    let (mut names, mut ports) = (HashSet::new(), HashSet::new());
    let mut parsed = Vec::with_capacity(services.len());
    for (index, service) in services.into_iter().enumerate() {
        let field = format!("spec.services[{index}]");
        check_name(&format!("{field}.name"), &service.name)?;
        if !names.insert(service.name.clone()) {
            let why = format!("{:?} is given twice", service.name);
            return Err(invalid_field(format!("{field}.name"), why));
        }
        let (image, entrypoint) = parse_image(&format!("{field}.image"), service.image)?;
        if let Image::ResourceType(_) = image {
            let why = "must not name a resource type: use host or an artifact";
            return Err(invalid_field(format!("{field}.image"), why));
        }
        let readiness =
            parse_readiness(&format!("{field}.readiness"), service.readiness.unwrap_or_default())?;
        if let ReadinessCheck::TcpPort(port) = readiness.check
            && !ports.insert(port)
        {
            let why = format!("{port} is the port of another service, and all services share one network");
            return Err(invalid_field(format!("{field}.readiness.tcp_port"), why));
        }
        parsed.push(Service {
            name: service.name,
            command: parse_command(&format!("{field}.command"), service.command, (&image, &entrypoint))?,
            prefers_image_directory: service.directory.is_empty() && has_defaults(&image),
            image,
            entrypoint,
            environment: parse_environment(&format!("{field}.environment"), service.environment)?,
            directory: parse_directory(&format!("{field}.directory"), &service.directory)?,
            user: Some(service.user).filter(|user| !user.is_empty()),
            limits: parse_limits(service.limits.unwrap_or_default()),
            readiness,
            essential: service.essential,
        });
    }
    Ok(parsed)
}

/// Checks a name, which is also a host name.
fn check_name(field: &str, name: &str) -> Result<(), Status> {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.bytes().all(is_allowed) {
        return Err(invalid_field(field, format!("must be 1 to {MAX_NAME_BYTES} characters of a-z 0-9 -")));
    }
    if name.starts_with('-') || name.ends_with('-') {
        return Err(invalid_field(field, "must begin and end with a letter or a digit"));
    }
    if name == "localhost" {
        return Err(invalid_field(field, "must not be localhost"));
    }
    Ok(())
}

fn parse_readiness(field: &str, readiness: pb::Readiness) -> Result<Readiness, Status> {
    let timeout = parse_duration(&format!("{field}.timeout"), readiness.timeout)?;
    if timeout.is_some_and(|timeout| timeout.is_zero() || timeout > MAX_READINESS_TIMEOUT) {
        return Err(invalid_field(format!("{field}.timeout"), "must be more than 0, and at most 1 h"));
    }
    let check = match readiness.check {
        None => ReadinessCheck::Started,
        Some(pb::readiness::Check::TcpPort(port)) => match u16::try_from(port) {
            Ok(port @ 1..) => ReadinessCheck::TcpPort(port),
            _ => return Err(invalid_field(format!("{field}.tcp_port"), "must be 1 to 65535")),
        },
        Some(pb::readiness::Check::Command(command)) => ReadinessCheck::Command(parse_command(
            &format!("{field}.command.arguments"),
            command.arguments,
            (&Image::Host, &None),
        )?),
    };
    Ok(Readiness { check, timeout: timeout.unwrap_or(DEFAULT_READINESS_TIMEOUT) })
}

pub(super) fn to_proto(service: &Service) -> pb::Service {
    let bytes = |bytes: &Bytes| bytes::Bytes::copy_from_slice(bytes);
    let check = match &service.readiness.check {
        ReadinessCheck::Started => None,
        ReadinessCheck::TcpPort(port) => Some(pb::readiness::Check::TcpPort((*port).into())),
        ReadinessCheck::Command(arguments) => {
            let arguments = arguments.iter().map(bytes).collect();
            Some(pb::readiness::Check::Command(pb::ReadinessCommand { arguments }))
        }
    };
    pb::Service {
        name: service.name.clone(),
        image: Some(image_to_proto(&service.image, service.entrypoint.as_deref())),
        command: service.command.iter().map(bytes).collect(),
        environment: environment_to_proto(&service.environment),
        directory: directory_to_proto(&service.directory, service.prefers_image_directory),
        user: service.user.clone().unwrap_or_default(),
        limits: Some(limits_to_proto(&service.limits)),
        readiness: Some(pb::Readiness { check, timeout: Some(duration(service.readiness.timeout)) }),
        essential: service.essential,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use domain::ArtifactId;

    fn service(name: &str) -> pb::Service {
        let command = vec![bytes::Bytes::from_static(b"serve")];
        pb::Service {
            name: name.to_owned(),
            image: Some(image_to_proto(&Image::Host, None)),
            command,
            ..Default::default()
        }
    }

    fn ready(check: pb::readiness::Check) -> Option<pb::Readiness> {
        Some(pb::Readiness { check: Some(check), timeout: None })
    }

    fn check_all(services: Vec<pb::Service>) -> Result<Vec<Service>, Status> {
        check(&services)?;
        parse(services)
    }

    #[test]
    fn service_has_defaults() {
        let parsed = check_all(vec![service("db"), service("0-b")]).expect("valid");
        assert_eq!(parsed[0].directory, super::super::DEFAULT_DIRECTORY);
        let readiness = Readiness { check: ReadinessCheck::Started, timeout: Duration::from_secs(60) };
        assert_eq!((&parsed[0].readiness, parsed[0].essential), (&readiness, false));
        assert_eq!(parse(parsed.iter().map(to_proto).collect()).expect("a stored spec"), parsed);
    }

    #[test]
    fn complete_service_is_converted_back() {
        let artifact = Image::Artifact(ArtifactId::new());
        let arguments = vec![bytes::Bytes::from_static(b"check"), bytes::Bytes::from_static(b"\xff")];
        let complete = pb::Service {
            image: Some(image_to_proto(&artifact, None)),
            environment: vec![pb::EnvironmentVariable { name: "A".into(), value: "b".into() }],
            directory: "/srv".into(),
            user: "db".to_owned(),
            limits: Some(pb::Limits { memory_bytes: 1 << 30, ..Default::default() }),
            readiness: Some(pb::Readiness {
                check: Some(pb::readiness::Check::Command(pb::ReadinessCommand { arguments })),
                timeout: Some(duration(Duration::from_secs(5))),
            }),
            essential: true,
            ..service("db")
        };
        let port = pb::Service { readiness: ready(pb::readiness::Check::TcpPort(5432)), ..service("port") };
        let parsed = check_all(vec![complete, port]).expect("valid");
        assert_eq!((&parsed[0].image, parsed[0].essential), (&artifact, true));
        assert_eq!(parsed[1].readiness.check, ReadinessCheck::TcpPort(5432));
        assert_eq!(parse(parsed.iter().map(to_proto).collect()).expect("a stored spec"), parsed);
    }

    #[test]
    fn invalid_service_is_rejected() {
        use pb::readiness::Check;
        let named = |name: &str| vec![service(name)];
        let with = |change: &dyn Fn(&mut pb::Service)| {
            let mut service = service("db");
            change(&mut service);
            vec![service]
        };
        let resource_type = image_to_proto(&Image::ResourceType("git".to_owned()), None);
        let nul = bytes::Bytes::from_static(b"a\0b");
        let timeout =
            |seconds| pb::Readiness { check: None, timeout: Some(duration(Duration::from_secs(seconds))) };
        let cases = [
            (named(""), "[0].name"),
            (named(&"a".repeat(64)), "[0].name"),
            (named("Db"), "[0].name"),
            (named("a.b"), "[0].name"),
            (named("-a"), "[0].name"),
            (named("a-"), "[0].name"),
            (named("localhost"), "[0].name"),
            (vec![service("db"), service("db")], "[1].name"),
            (with(&|service| service.image = None), "[0].image"),
            (
                with(&|service| service.image = Some(pb::Image { source: None, entrypoint: None })),
                "[0].image.source",
            ),
            (with(&|service| service.image = Some(resource_type.clone())), "[0].image"),
            (with(&|service| service.command.clear()), "[0].command"),
            (with(&|service| service.command.push(nul.clone())), "[0].command[1]"),
            (with(&|service| service.environment.push(Default::default())), "[0].environment[0].name"),
            (with(&|service| service.directory = "../x".into()), "[0].directory"),
            (with(&|service| service.user = "a".repeat(1025)), "[0].user"),
            (
                with(&|service| service.limits = Some(pb::Limits { memory_bytes: 1, ..Default::default() })),
                "[0].limits.memory_bytes",
            ),
            (with(&|service| service.readiness = ready(Check::TcpPort(0))), "[0].readiness.tcp_port"),
            (with(&|service| service.readiness = ready(Check::TcpPort(65536))), "[0].readiness.tcp_port"),
            (
                with(&|service| service.readiness = ready(Check::Command(Default::default()))),
                "[0].readiness.command.arguments",
            ),
            (
                ["a", "b"]
                    .map(|name| pb::Service { readiness: ready(Check::TcpPort(80)), ..service(name) })
                    .to_vec(),
                "[1].readiness.tcp_port",
            ),
            (with(&|service| service.readiness = Some(timeout(0))), "[0].readiness.timeout"),
            (with(&|service| service.readiness = Some(timeout(3601))), "[0].readiness.timeout"),
            ((0..17).map(|index| service(&format!("s{index}"))).collect(), ""),
        ];
        for (services, field) in cases {
            let status = check_all(services).expect_err(field);
            let violations = tonic_types::StatusExt::get_details_bad_request(&status).expect("a field");
            assert_eq!(violations.field_violations[0].field, format!("spec.services{field}"));
        }
    }
}
