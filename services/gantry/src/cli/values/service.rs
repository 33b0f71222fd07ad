//! Parser for the value of `--service`.

use std::time::Duration;

use domain::workload::Image;

use super::{ImageArg, positive_duration};

/// Value of `--service`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ServiceArg {
    pub(crate) name: String,
    pub(crate) image: ImageArg,
    pub(crate) check: Option<ServiceCheck>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) essential: bool,
    /// Command for `sh -c`. `None`: that of the image.
    pub(crate) command: Option<String>,
}

/// Check whether a service is ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ServiceCheck {
    /// TCP port.
    Port(u16),
    /// Command for `sh -c`.
    Command(String),
}

/// Parses `NAME=IMAGE`, followed by parts that begin with a comma. The command is the last part.
pub(crate) fn service(text: &str) -> Result<ServiceArg, String> {
    let Some((name, rest)) = text.split_once('=').filter(|(name, _)| !name.contains(',')) else {
        return Err(
            "write NAME=IMAGE,command=COMMAND, such as db=host,port=5432,command='exec serve'".to_owned()
        );
    };
    let (rest, command) = match rest.split_once(",command=") {
        Some((rest, command)) if !command.is_empty() => (rest, Some(command.to_owned())),
        Some(_) => return Err("the command is missing after ,command=".to_owned()),
        None => (rest, None),
    };
    let mut parts = rest.split(',');
    let image = super::image(parts.next().unwrap_or_default())?;
    match image {
        ImageArg::Known(Image::ResourceType(_)) => {
            return Err("the image of a service cannot be a resource type".to_owned());
        }
        ImageArg::Known(Image::Host) if command.is_none() => {
            return Err("the command is missing: add ,command=COMMAND at the end".to_owned());
        }
        _ => {}
    }
    let mut parsed =
        ServiceArg { name: name.to_owned(), image, check: None, timeout: None, essential: false, command };
    for part in parts {
        let check = match part.split_once('=') {
            None if part == "essential" => {
                parsed.essential = true;
                continue;
            }
            Some(("timeout", timeout)) => {
                parsed.timeout = Some(positive_duration(timeout).map_err(|why| format!("timeout: {why}"))?);
                continue;
            }
            Some(("port", port)) => match port.parse() {
                Ok(port @ 1..) => ServiceCheck::Port(port),
                _ => return Err(format!("port: {port:?} must be a number from 1 to 65535")),
            },
            Some(("ready", command)) if !command.is_empty() => ServiceCheck::Command(command.to_owned()),
            _ => {
                return Err(format!(
                    "{part:?} must be port=N, ready=SH, timeout=DURATION or essential; only the command may contain commas"
                ));
            }
        };
        if parsed.check.replace(check).is_some() {
            return Err("write only one of port=N and ready=SH".to_owned());
        }
    }
    Ok(parsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_has_parts_before_its_command() {
        let parsed =
            service("db=host,port=5432,timeout=5s,essential,command=exec serve a,b=c").expect("valid");
        let expected = ServiceArg {
            name: "db".to_owned(),
            image: ImageArg::Known(Image::Host),
            check: Some(ServiceCheck::Port(5432)),
            timeout: Some(Duration::from_secs(5)),
            essential: true,
            command: Some("exec serve a,b=c".to_owned()),
        };
        assert_eq!(parsed, expected);
        let ready = service("db=host,ready=test -e /x,command=serve").expect("valid");
        assert_eq!(ready.check, Some(ServiceCheck::Command("test -e /x".to_owned())));
        let image = service("db=postgres:15,port=5432").expect("valid");
        assert_eq!((image.image, image.command), (ImageArg::Registry("postgres:15".to_owned()), None));
        for (wrong, why) in [
            ("db", "NAME=IMAGE"),
            ("db=host", "command is missing"),
            ("db=host,command=", "command is missing"),
            ("db=Postgres,command=x", "lower case"),
            ("db=resource-type:git,command=x", "cannot be a resource type"),
            ("db=host,port=0,command=x", "port"),
            ("db=host,port=70000,command=x", "port"),
            ("db=host,timeout=0,command=x", "timeout"),
            ("db=host,port=1,ready=x,command=x", "only one"),
            ("db=host,other=1,command=x", "other=1"),
        ] {
            let error = service(wrong).expect_err(wrong);
            assert!(error.contains(why), "{error}");
        }
    }
}
