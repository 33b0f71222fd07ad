//! Why a worker does not do.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;

use domain::workload::Failure;

use super::types::Resources;

/// One reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It has been out of contact for so long that it does not count.
    Lost,
    /// It was lost only minutes ago, and may come back.
    JustLost,
    /// It went only minutes ago, and is waited for in case another takes its place.
    Gone,
    /// It takes no more work, for good.
    Retiring,
    /// Its gateway speaks only these versions of the protocol.
    Incompatible(Vec<u32>),
    /// An attempt at the same workload could not be started there.
    FailedThere(Failure),
    /// It is of another platform.
    Platform(String),
    /// It is another team's.
    Team,
    /// It takes only workloads with tags.
    OnlyTagged(Vec<String>),
    /// It lacks these tags.
    MissingTags(Vec<String>),
    /// It cannot run this kind of image.
    ImageKind(Cow<'static, str>),
    /// It brings no image along for this resource type.
    ResourceType(String),
    /// Its runtime cannot do this.
    Capability(Cow<'static, str>),
    /// More is asked for than it has in all.
    TooSmall(Shortage),
    /// It is to be avoided.
    Avoided,
    /// It is not the one on which something else is that must be near.
    NotSame,
    /// It takes no work for now.
    Cordoned,
    /// It is out of contact.
    Stalled,
    /// It fails again and again, and is not tried for now, or only with one task.
    Quarantined(String),
    /// The team has workers of its own, and keeps to them.
    TeamKeepsToItsOwn,
    /// It is reserved for another that waits for more than comes free at a time.
    Reserved,
    /// All of its slots are taken.
    Full { active: u32, max: u32 },
    /// It has as many containers as it may have.
    FullOfContainers { count: u64, max: u32 },
    /// It has as many volumes as it may have.
    FullOfVolumes { count: u64, max: u32 },
    /// What is left of it is less than is asked for.
    Short(Shortage),
}

/// Less is there than is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Shortage {
    pub(crate) of: Resource,
    pub(crate) asked: u64,
    pub(crate) left: u64,
}

/// What a worker has an amount of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Resource {
    /// Thousandths of a processor.
    Cpu,
    /// Bytes.
    Memory,
    /// Bytes.
    Disk,
}

/// Every [`Refusal::code`].
pub(crate) const CODES: [&str; 25] = [
    "LOST",
    "JUST_LOST",
    "GONE",
    "RETIRING",
    "INCOMPATIBLE",
    "FAILED_THERE",
    "PLATFORM",
    "TEAM",
    "ONLY_TAGGED",
    "MISSING_TAGS",
    "IMAGE_KIND",
    "RESOURCE_TYPE",
    "CAPABILITY",
    "TOO_SMALL",
    "AVOIDED",
    "NOT_SAME",
    "CORDONED",
    "STALLED",
    "QUARANTINED",
    "TEAM_KEEPS_TO_ITS_OWN",
    "RESERVED",
    "FULL",
    "FULL_OF_CONTAINERS",
    "FULL_OF_VOLUMES",
    "SHORT",
];

impl Refusal {
    /// Whether it may pass by itself.
    pub(crate) fn passes(&self) -> bool {
        match self {
            Self::JustLost
            | Self::Gone
            | Self::Cordoned
            | Self::Stalled
            | Self::Quarantined(_)
            | Self::TeamKeepsToItsOwn
            | Self::Reserved
            | Self::Full { .. }
            | Self::FullOfContainers { .. }
            | Self::FullOfVolumes { .. }
            | Self::Short(_) => true,
            Self::Lost
            | Self::Retiring
            | Self::Incompatible(_)
            | Self::FailedThere(_)
            | Self::Platform(_)
            | Self::Team
            | Self::OnlyTagged(_)
            | Self::MissingTags(_)
            | Self::ImageKind(_)
            | Self::ResourceType(_)
            | Self::Capability(_)
            | Self::TooSmall(_)
            | Self::Avoided
            | Self::NotSame => false,
        }
    }

    /// What is told before others is less: first what will not pass by itself, then what is no matter of what is on it.
    pub(super) fn order(&self) -> impl Ord + use<> {
        let is_of_worker = matches!(
            self,
            Self::JustLost | Self::Gone | Self::Cordoned | Self::Stalled | Self::Quarantined(_)
        );
        (self.passes(), self.passes() && !is_of_worker)
    }

    /// For programs.
    pub(crate) fn code(&self) -> &'static str {
        match self {
            Self::Lost => "LOST",
            Self::JustLost => "JUST_LOST",
            Self::Gone => "GONE",
            Self::Retiring => "RETIRING",
            Self::Incompatible(_) => "INCOMPATIBLE",
            Self::FailedThere(_) => "FAILED_THERE",
            Self::Platform(_) => "PLATFORM",
            Self::Team => "TEAM",
            Self::OnlyTagged(_) => "ONLY_TAGGED",
            Self::MissingTags(_) => "MISSING_TAGS",
            Self::ImageKind(_) => "IMAGE_KIND",
            Self::ResourceType(_) => "RESOURCE_TYPE",
            Self::Capability(_) => "CAPABILITY",
            Self::TooSmall(_) => "TOO_SMALL",
            Self::Avoided => "AVOIDED",
            Self::NotSame => "NOT_SAME",
            Self::Cordoned => "CORDONED",
            Self::Stalled => "STALLED",
            Self::Quarantined(_) => "QUARANTINED",
            Self::TeamKeepsToItsOwn => "TEAM_KEEPS_TO_ITS_OWN",
            Self::Reserved => "RESERVED",
            Self::Full { .. } => "FULL",
            Self::FullOfContainers { .. } => "FULL_OF_CONTAINERS",
            Self::FullOfVolumes { .. } => "FULL_OF_VOLUMES",
            Self::Short(_) => "SHORT",
        }
    }

    /// What would end it, for people.
    pub(crate) fn ended_by(&self) -> String {
        match self {
            Self::Lost | Self::JustLost | Self::Stalled => "its gateway is in contact again".to_owned(),
            Self::Gone | Self::Retiring => "another worker takes its place".to_owned(),
            Self::Incompatible(_) => "its gateway, or the scheduler, is of another version".to_owned(),
            Self::FailedThere(_) => "it is submitted anew".to_owned(),
            Self::Platform(platform) => format!("the workload asks for platform {platform}"),
            Self::Team => "it serves all teams, or this one".to_owned(),
            Self::OnlyTagged(tags) => format!("the workload asks for one of its tags: {}", tags.join(", ")),
            Self::MissingTags(tags) => format!("it has the {}", named(tags)),
            Self::ImageKind(kind) => format!("it can run {kind} images"),
            Self::ResourceType(name) => {
                format!("it brings an image of the resource type {name}, or the cluster has one")
            }
            Self::Capability(name) => format!("its runtime has {name}"),
            Self::TooSmall(shortage) => format!("no more than {} is asked for", shortage.left()),
            Self::Avoided => "it is not among those to be avoided".to_owned(),
            Self::NotSame => "it need not be near something else".to_owned(),
            Self::Cordoned => "it is told to run again".to_owned(),
            Self::Quarantined(_) => "it was tried again, and works".to_owned(),
            Self::TeamKeepsToItsOwn => "one of the team's own workers has room".to_owned(),
            Self::Reserved => "the one that it is reserved for is placed".to_owned(),
            Self::Full { .. } => "one of its tasks ends".to_owned(),
            Self::FullOfContainers { .. } => "one of its containers goes".to_owned(),
            Self::FullOfVolumes { .. } => "some of its volumes go".to_owned(),
            Self::Short(shortage) => format!("{} is free on it", shortage.asked()),
        }
    }

    /// What would end it on each of many, for people.
    pub(crate) fn ended_by_of_many(&self) -> String {
        match self {
            Self::OnlyTagged(tags) if tags.is_empty() => "the workload asks for its tags".to_owned(),
            Self::Full { .. } => "a task ends".to_owned(),
            Self::FullOfContainers { .. } => "a container goes".to_owned(),
            Self::FullOfVolumes { .. } => "some volumes go".to_owned(),
            Self::TooSmall(shortage) => format!("less {} is asked for", shortage.of()),
            one => one.ended_by(),
        }
    }

    /// What of it workers have in common that refuse for different tags, versions, or failures. The rest is left out.
    pub(crate) fn in_common(self) -> Self {
        match self {
            Self::OnlyTagged(_) => Self::OnlyTagged(Vec::new()),
            Self::Incompatible(_) => Self::Incompatible(Vec::new()),
            Self::Quarantined(_) => Self::Quarantined(String::new()),
            other => other,
        }
    }

    /// The limit that is reached: its name, how much it is, and how much there is or is asked for.
    pub(crate) fn limit(&self) -> Option<(&'static str, u64, u64)> {
        match self {
            Self::Full { active, max } => Some(("tasks", u64::from(*max), u64::from(*active))),
            Self::FullOfContainers { count, max } => Some(("containers", u64::from(*max), *count)),
            Self::FullOfVolumes { count, max } => Some(("volumes", u64::from(*max), *count)),
            Self::TooSmall(shortage) | Self::Short(shortage) => {
                Some((shortage.of.name(), shortage.left, shortage.asked))
            }
            _ => None,
        }
    }

    /// The labels that it is about.
    pub(crate) fn labels(&self) -> Vec<String> {
        match self {
            Self::Platform(name) | Self::ResourceType(name) => vec![name.clone()],
            Self::OnlyTagged(tags) | Self::MissingTags(tags) => tags.clone(),
            Self::ImageKind(name) | Self::Capability(name) => vec![name.clone().into_owned()],
            _ => Vec::new(),
        }
    }

    /// Tells apart what workers of one class may refuse for: one bit for each.
    pub(super) fn mark(&self) -> u32 {
        let number = match self {
            Self::NotSame => 0,
            Self::Avoided => 1,
            Self::FailedThere(_) => 2,
            Self::TeamKeepsToItsOwn => 3,
            Self::Quarantined(_) => 4,
            Self::Full { .. } => 5,
            Self::FullOfContainers { .. } => 6,
            Self::FullOfVolumes { .. } => 7,
            Self::TooSmall(shortage) => 8 + shortage.of as u32,
            Self::Short(shortage) => 11 + shortage.of as u32,
            Self::Reserved => 14,
            _ => 31,
        };
        1 << number
    }

    /// Whether it refuses for nothing but what is on it now.
    pub(super) fn is_for_load(&self) -> bool {
        matches!(
            self,
            Self::Full { .. } | Self::FullOfContainers { .. } | Self::FullOfVolumes { .. } | Self::Short(_)
        )
    }

    /// Whether both have the same [`Refusal::of_many`].
    fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Incompatible(_), Self::Incompatible(_))
            | (Self::FailedThere(_), Self::FailedThere(_))
            | (Self::Quarantined(_), Self::Quarantined(_))
            | (Self::Full { .. }, Self::Full { .. })
            | (Self::FullOfContainers { .. }, Self::FullOfContainers { .. })
            | (Self::FullOfVolumes { .. }, Self::FullOfVolumes { .. }) => true,
            (Self::TooSmall(one), Self::TooSmall(two)) | (Self::Short(one), Self::Short(two)) => {
                one.of == two.of
            }
            (one, two) => one == two,
        }
    }

    /// The same of many, without what is different from one to the next.
    pub(crate) fn of_many(&self) -> String {
        match self {
            Self::Lost => "are lost".to_owned(),
            Self::JustLost => "were lost minutes ago".to_owned(),
            Self::Gone => "went away minutes ago".to_owned(),
            Self::Retiring => "are retiring".to_owned(),
            Self::Incompatible(_) => "have gateways that speak other versions of the protocol".to_owned(),
            Self::FailedThere(_) => "could not start it".to_owned(),
            Self::Platform(platform) => format!("are of platform {platform}"),
            Self::Team => "serve other teams".to_owned(),
            Self::OnlyTagged(tags) if tags.is_empty() => "serve only workloads with their tags".to_owned(),
            Self::OnlyTagged(tags) => format!("serve only workloads tagged {}", tags.join(", ")),
            Self::MissingTags(tags) => format!("lack the {}", named(tags)),
            Self::ImageKind(kind) => format!("cannot run {kind} images"),
            Self::ResourceType(name) => format!("bring no image of the resource type {name}"),
            Self::Capability(name) => format!("have a runtime that lacks {name}"),
            Self::TooSmall(shortage) => format!("have less {} than is asked for", shortage.of()),
            Self::Avoided => "are to be avoided".to_owned(),
            Self::NotSame => "are not the worker that is asked for".to_owned(),
            Self::Cordoned => "are cordoned".to_owned(),
            Self::Stalled => "are out of contact".to_owned(),
            Self::Quarantined(_) => "are quarantined, for they fail again and again".to_owned(),
            Self::TeamKeepsToItsOwn => "are for all teams, and this one keeps to its own".to_owned(),
            Self::Reserved => "are reserved for others that have waited long for so much".to_owned(),
            Self::Full { .. } => "are full".to_owned(),
            Self::FullOfContainers { .. } => "have as many containers as they may have".to_owned(),
            Self::FullOfVolumes { .. } => "have as many volumes as they may have".to_owned(),
            Self::Short(shortage) => format!("have too little {} left", shortage.of()),
        }
    }
}

/// Tags as one speaks of them: "tag gpu", "tags gpu, large".
fn named(tags: &[String]) -> String {
    let what = if tags.len() == 1 { "tag" } else { "tags" };
    format!("{what} {}", tags.join(", "))
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost => f.write_str("is lost"),
            Self::JustLost => f.write_str("was lost minutes ago"),
            Self::Gone => f.write_str("went away minutes ago"),
            Self::Retiring => f.write_str("is retiring"),
            Self::Incompatible(versions) => {
                let versions: Vec<_> = versions.iter().map(ToString::to_string).collect();
                let versions = if versions.is_empty() { "no".to_owned() } else { versions.join(", ") };
                write!(f, "its gateway speaks another version of the protocol ({versions})")
            }
            Self::FailedThere(failure) => {
                write!(f, "could not start it: {} ({})", failure.message, failure.reason)
            }
            Self::Platform(platform) => write!(f, "its platform is {platform}"),
            Self::Team => f.write_str("serves another team"),
            Self::OnlyTagged(tags) => write!(f, "serves only workloads tagged {}", tags.join(", ")),
            Self::MissingTags(tags) => write!(f, "lacks the {}", named(tags)),
            Self::ImageKind(kind) => write!(f, "cannot run {kind} images"),
            Self::ResourceType(name) => write!(f, "brings no image of the resource type {name}"),
            Self::Capability(name) => write!(f, "its runtime lacks {name}"),
            Self::TooSmall(shortage) => {
                write!(f, "has {} in all, and {} is asked for", shortage.left(), shortage.asked())
            }
            Self::Avoided => f.write_str("is to be avoided"),
            Self::NotSame => f.write_str("is not the worker that is asked for"),
            Self::Cordoned => f.write_str("is cordoned"),
            Self::Stalled => f.write_str("is out of contact"),
            Self::Quarantined(why) => write!(f, "is quarantined, for it fails again and again: {why}"),
            Self::TeamKeepsToItsOwn => f.write_str("is for all teams, and this one keeps to its own"),
            Self::Reserved => f.write_str("is reserved for another that has waited long for so much"),
            Self::Full { active, max } => write!(f, "is full ({active} of {max} tasks)"),
            Self::FullOfContainers { count, max } => write!(f, "has {count} of {max} containers"),
            Self::FullOfVolumes { count, max } => write!(f, "has {count} of {max} volumes"),
            Self::Short(shortage) => {
                write!(f, "has {} left, and {} is asked for", shortage.left(), shortage.asked())
            }
        }
    }
}

impl Resource {
    fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu_millis",
            Self::Memory => "memory_bytes",
            Self::Disk => "disk_bytes",
        }
    }
}

impl Shortage {
    fn of(self) -> &'static str {
        match self.of {
            Resource::Cpu => "processor time",
            Resource::Memory => "memory",
            Resource::Disk => "disk",
        }
    }

    fn amount(self, amount: u64) -> String {
        match self.of {
            Resource::Cpu => cores(amount),
            Resource::Memory => format!("{} of memory", self.size(amount)),
            Resource::Disk => format!("{} of disk", self.size(amount)),
        }
    }

    /// Bytes as people count them, unless what is asked for and what is left would look alike then.
    fn size(self, bytes: u64) -> String {
        match (rounded(self.asked), rounded(self.left)) {
            (asked, left) if asked != left => rounded(bytes),
            _ => format!("{bytes} bytes"),
        }
    }

    fn asked(self) -> String {
        self.amount(self.asked)
    }

    fn left(self) -> String {
        self.amount(self.left)
    }
}

impl Resources {
    /// What is asked for, for people.
    pub(crate) fn words(&self) -> Vec<String> {
        let Self { cpu_millis, memory_bytes, disk_bytes } = *self;
        let asked = [
            (cpu_millis, cores(cpu_millis)),
            (memory_bytes, format!("{} of memory", rounded(memory_bytes))),
            (disk_bytes, format!("{} of disk", rounded(disk_bytes))),
        ];
        asked.into_iter().filter(|(amount, _)| *amount > 0).map(|(_, words)| words).collect()
    }
}

/// Such as `1.5 cores`.
fn cores(millis: u64) -> String {
    match millis {
        1000 => "1 core".to_owned(),
        _ => {
            let (whole, rest) = (millis / 1000, millis % 1000);
            let rest = format!(".{rest:03}");
            format!("{whole}{} cores", rest.trim_end_matches('0').trim_end_matches('.'))
        }
    }
}

/// Such as `1.5 GiB`.
fn rounded(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    // Each of them has 1024 of the one before.
    let Some(unit) = bytes.checked_ilog2().map(|power| power / 10).filter(|unit| *unit > 0) else {
        return format!("{bytes} bytes");
    };
    let unit = unit.min(5);
    let name = units.get(unit as usize - 1).copied().unwrap_or("PiB");
    format!("{:.1} {name}", bytes as f64 / 1024_f64.powf(f64::from(unit)))
}

/// Up to how many workers each is told for itself.
const EACH: usize = 10;

/// How many of a group are named.
const NAMED: usize = 3;

/// Why each worker refused. Of many, those that refuse for the same reason are told together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Refusals(Vec<Group>);

/// Workers that refuse for the same reason.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Group {
    refusal: Refusal,
    count: usize,
    /// Some of their names; all, where they are few.
    names: Vec<String>,
}

impl Refusals {
    /// What workers say, each under its name.
    #[cfg(test)]
    pub(super) fn of(refusals: impl IntoIterator<Item = (String, Refusal)>) -> Self {
        let mut all = Self::default();
        for (name, refusal) in refusals {
            all.add(refusal, 1, || std::iter::once(name));
        }
        all.sorted()
    }

    /// `count` more refuse for this reason; of their `names` as many are taken as are told.
    pub(super) fn add<I: Iterator<Item = String>>(
        &mut self,
        refusal: Refusal,
        count: usize,
        names: impl FnOnce() -> I,
    ) {
        let alike = |group: &&mut Group| group.refusal.is_like(&refusal);
        // While they are few each has its own numbers.
        if self.count() + count > EACH
            && let Some(group) = self.0.iter_mut().find(alike)
        {
            group.count += count;
            let more = NAMED.saturating_sub(group.names.len());
            group.names.extend(names().take(more));
            return;
        }
        let names = names().take(if count <= EACH { count } else { NAMED }).collect();
        self.0.push(Group { refusal, count, names });
    }

    /// In an order that does not depend on that of the workers.
    pub(super) fn sorted(mut self) -> Self {
        if self.count() <= EACH {
            self.0.sort_by(|one, other| one.names.cmp(&other.names));
            return self;
        }
        let mut groups: Vec<Group> = Vec::new();
        for group in self.0 {
            match groups.iter_mut().find(|known| known.refusal.is_like(&group.refusal)) {
                Some(known) => {
                    known.count += group.count;
                    known.names.extend(group.names);
                }
                None => groups.push(group),
            }
        }
        for group in &mut groups {
            group.names.sort();
            group.names.truncate(NAMED);
        }
        groups.sort_by_key(|group| (std::cmp::Reverse(group.count), group.refusal.of_many()));
        Self(groups)
    }

    pub(super) fn count(&self) -> usize {
        self.0.iter().map(|group| group.count).sum()
    }

    /// The reasons of a worker, or of a group.
    #[cfg(test)]
    pub(crate) fn reasons(&self) -> Vec<&Refusal> {
        self.0.iter().map(|group| &group.refusal).collect()
    }

    /// One entry for each worker, under its name; of many, one for each reason, under the number of workers.
    pub(crate) fn entries(&self) -> Vec<(String, String)> {
        let few = self.count() <= EACH;
        let mut entries = Vec::new();
        for group in &self.0 {
            if few {
                entries.extend(group.names.iter().map(|name| (name.clone(), group.refusal.to_string())));
            } else {
                let more = if group.count > group.names.len() { ", …" } else { "" };
                let who = match group.count {
                    1 => group.names.join(""),
                    count => format!("{count} workers ({}{more})", group.names.join(", ")),
                };
                let what = if group.count == 1 { group.refusal.to_string() } else { group.refusal.of_many() };
                entries.push((who, what));
            }
        }
        entries
    }

    /// The code of each, once.
    pub(crate) fn codes(&self) -> BTreeSet<&'static str> {
        self.0.iter().map(|group| group.refusal.code()).collect()
    }

    /// The entries as lines.
    pub(crate) fn lines(&self) -> Vec<String> {
        if self.0.is_empty() {
            return vec!["no worker has registered yet".to_owned()];
        }
        self.entries().into_iter().map(|(who, what)| format!("{who}: {what}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_is_said_as_people_do() {
        let asked = Resources { cpu_millis: 1500, memory_bytes: 3 << 29, disk_bytes: 0 };
        assert_eq!(asked.words(), ["1.5 cores", "1.5 GiB of memory"]);
        let words = [1, 50, 1000, 2000, 10_250].map(cores);
        assert_eq!(words, ["0.001 cores", "0.05 cores", "1 core", "2 cores", "10.25 cores"]);
    }

    #[test]
    fn few_are_told_one_by_one_and_many_together() {
        let full = |n: u32| (format!("w{n:03}"), Refusal::Full { active: n, max: n });
        assert_eq!(
            Refusals::of([full(2), full(1)]).lines(),
            ["w001: is full (1 of 1 tasks)", "w002: is full (2 of 2 tasks)"]
        );
        let many = (0..500).map(full).chain([("odd".to_owned(), Refusal::Cordoned)]);
        assert_eq!(
            Refusals::of(many).lines(),
            ["500 workers (w000, w001, w002, …): are full".to_owned(), "odd: is cordoned".to_owned()]
        );
        assert_eq!(Refusals::default().lines(), ["no worker has registered yet"]);
    }
}
