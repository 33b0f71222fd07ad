//! Users of an image: lookup of `name`, `uid`, `name:group` and `uid:gid`.

use serde::{Deserialize, Serialize};

/// The user of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct User {
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// Supplementary groups.
    pub(super) groups: Vec<u32>,
    pub(super) home: String,
}

/// The account files of an image.
pub(super) struct Users<'a> {
    /// Contents of `/etc/passwd`.
    pub(super) passwd: &'a str,
    /// Contents of `/etc/group`.
    pub(super) group: &'a str,
}

struct Account<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

impl<'a> Users<'a> {
    fn accounts(&self) -> impl Iterator<Item = Account<'a>> {
        self.passwd.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?;
            let uid = id(fields.nth(1)?)?;
            let gid = id(fields.next()?)?;
            Some(Account { name, uid, gid, home: fields.nth(1)? })
        })
    }

    /// Name, id and members of each group.
    fn groups(&self) -> impl Iterator<Item = (&'a str, u32, &'a str)> {
        self.group.lines().filter_map(|line| {
            let mut fields = line.split(':');
            Some((fields.next()?, id(fields.nth(1)?)?, fields.next().unwrap_or("")))
        })
    }

    /// Finds a user. `None` is root. A numeric id may be missing in the image, but a name must
    /// exist.
    pub(super) fn find(&self, requested: Option<&str>) -> Option<User> {
        let (user, group) = match requested.unwrap_or("0").split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (requested.unwrap_or("0"), None),
        };
        // Digits that are also a user name count as a name, as in container engines.
        let account = self
            .accounts()
            .find(|account| account.name == user)
            .or_else(|| id(user).and_then(|uid| self.accounts().find(|one| one.uid == uid)));
        let uid = match &account {
            Some(account) => account.uid,
            None => id(user)?,
        };
        let gid = match group {
            None => account.as_ref().map_or(0, |account| account.gid),
            Some(group) => {
                let known = self.groups().find(|(name, ..)| *name == group).map(|(_, gid, _)| gid);
                known.or_else(|| id(group))?
            }
        };
        let member =
            |members: &str| account.as_ref().is_some_and(|one| members.split(',').any(|m| m == one.name));
        // A stated group replaces all groups of the user.
        let groups = match group {
            Some(_) => Vec::new(),
            None => self.groups().filter(|(_, _, members)| member(members)).map(|(_, gid, _)| gid).collect(),
        };
        let home = account.map(|account| account.home).filter(|home| !home.is_empty()).unwrap_or("/");
        Some(User { uid, gid, groups, home: home.to_owned() })
    }
}

/// Parses the id of a user or a group. The largest number is invalid, because to the system it
/// means no change.
fn id(text: &str) -> Option<u32> {
    text.parse().ok().filter(|id| *id != u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const USERS: Users<'static> = Users {
        passwd: "root:x:0:0:root:/root:/bin/sh\nann:x:1000:1001:Ann:/home/ann:/bin/sh\n+::::::\n7:x:70:70::/:/bin/sh\n",
        group: "root:x:0:\nann:x:1001:\naudio:x:29:bob,ann\nwheel:x:30:annie\n",
    };

    fn found(requested: Option<&str>) -> Option<(u32, u32, Vec<u32>, String)> {
        USERS.find(requested).map(|user| (user.uid, user.gid, user.groups, user.home))
    }

    #[test]
    fn users_are_found_by_name_and_by_id() {
        assert_eq!(found(None), Some((0, 0, vec![], "/root".to_owned())));
        assert_eq!(found(Some("ann")), Some((1000, 1001, vec![29], "/home/ann".to_owned())));
        assert_eq!(found(Some("1000")), found(Some("ann")));
        assert_eq!(found(Some("ann:audio")), Some((1000, 29, vec![], "/home/ann".to_owned())));
        assert_eq!(found(Some("4242:77")), Some((4242, 77, vec![], "/".to_owned())));
        assert_eq!(found(Some("4242")), Some((4242, 0, vec![], "/".to_owned())));
        assert_eq!(found(Some("7")), Some((70, 70, vec![], "/".to_owned())));
    }

    #[test]
    fn unknown_names_are_rejected() {
        assert_eq!(found(Some("bob")), None);
        assert_eq!(found(Some("ann:nobody")), None);
        assert_eq!(found(Some("")), None);
        assert_eq!(found(Some("-1")), None);
        assert_eq!(found(Some("4294967296")), None);
        assert_eq!(found(Some("4294967295")), None, "the system reads it as no change");
        assert_eq!(found(Some("ann:4294967295")), None);
    }
}
