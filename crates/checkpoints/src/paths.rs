//! Paths of weights: parts renamed, and the last as PyTorch calls it.

/// A path with its first part renamed, and the last as PyTorch calls it.
pub(crate) fn renamed(path: &[&str], names: &[(&str, &str)]) -> String {
    let mut parts = path.to_vec();
    // The norm inside of a norm with a gate is no part of the name.
    if let [.., _, "norm", "gamma"] = parts[..] {
        parts.remove(parts.len() - 2);
    }
    if let Some((_, name)) = names.iter().find(|(ours, _)| parts.first() == Some(ours)) {
        parts[0] = name;
    }
    let last = parts.pop().unwrap_or_default();
    parts.push(match (parts.is_empty(), last) {
        (true, "a_log") => "A_log",
        (true, "d") => "D",
        (_, last) => parameter(last),
    });
    parts.join(".")
}

/// A norm's weights have names of their own here.
pub(crate) fn parameter(name: &str) -> &str {
    match name {
        "gamma" => "weight",
        "beta" => "bias",
        other => other,
    }
}
