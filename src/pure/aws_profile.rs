//! AWS shared credentials files: sections in brackets, `name = value` lines, comments.
//!
//! Source: AWS SDKs and Tools Reference Guide, "Shared config and credentials files".

use super::secret::Secret;
use super::sigv4::Credentials;

/// The credentials of a profile. `None` when the file does not have both parts of them.
pub fn credentials(file: &str, profile: &str) -> Option<Credentials> {
    let mut within = false;
    let (mut id, mut secret, mut token) = (None, None, None);
    for line in file.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[') {
            let name = section.split(']').next().unwrap_or_default().trim();
            within = name == profile || name.strip_prefix("profile ").map(str::trim) == Some(profile);
            continue;
        }
        if !within || line.starts_with(['#', ';']) {
            continue;
        }
        let Some((name, value)) = line.split_once('=') else { continue };
        let value = value.trim();
        match name.trim() {
            "aws_access_key_id" => id = Some(value),
            "aws_secret_access_key" => secret = Some(value),
            "aws_session_token" => token = Some(value),
            _ => {}
        }
    }
    let present = |value: Option<&str>| value.map(str::to_owned).filter(|value| !value.is_empty());
    Some(Credentials {
        access_key_id: present(id)?.into(),
        secret_access_key: Secret::new(present(secret)?),
        session_token: present(token).map(Secret::new),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the asked profile is read, with or without a token, and half a profile is none. Method: one file.
    #[test]
    fn profiles() {
        let file = "# a comment\n[default]\naws_access_key_id = AK\naws_secret_access_key=s=/+\n\n[ profile two ]\n\
                    ; other\naws_access_key_id=B\naws_secret_access_key = t\naws_session_token = u\nregion = x\n\
                    [half]\naws_access_key_id=C\n";
        let default = credentials(file, "default").expect("a profile");
        assert!(&*default.access_key_id == "AK" && default.secret_access_key.is("s=/+"));
        assert!(default.session_token.is_none());
        let two = credentials(file, "two").expect("a profile");
        assert!(two.session_token.is_some_and(|token| token.is("u")));
        assert!(credentials(file, "half").is_none() && credentials(file, "none").is_none());
    }
}
