//! The types of hellos and control messages, read from the source of ronde-wire.

use std::fmt::Write as _;
use std::fs;

use quote::ToTokens;

/// The section of the document.
pub(super) fn section() -> String {
    let mut text = "```text\n".to_owned();
    for path in FILES {
        let source = fs::read_to_string(super::root().join("proto/wire/src").join(path)).expect("a file of ronde-wire");
        let file = syn::parse_file(&source).expect("ronde-wire is Rust");
        for item in &file.items {
            match item {
                syn::Item::Macro(numbers) if numbers.mac.path.is_ident("number") => text.push_str(&number(numbers)),
                syn::Item::Struct(item) if is_written(item) && !LOCAL.iter().any(|name| item.ident == name) => {
                    text.push_str(&structure(item));
                }
                syn::Item::Enum(item) if is_sent(&item.attrs) && item.ident != SETTING => {
                    text.push_str(&enumeration(item));
                }
                _ => {}
            }
        }
    }
    text.push_str("```\n");
    text
}

/// Those with types that are sent, in the order of the document.
const FILES: [&str; 15] = [
    "ids.rs",
    "dtype.rs",
    "codec.rs",
    "plugin.rs",
    "collective.rs",
    "request.rs",
    "tuning.rs",
    "record.rs",
    "failure.rs",
    "world.rs",
    "sidecars.rs",
    "relay.rs",
    "schedule.rs",
    "control.rs",
    "frame.rs",
];

/// Types that never leave a sidecar by themselves.
const LOCAL: [&str; 6] = ["PluginCall", "PluginValue", "Blame", "WorldWire", "SetMember", "SetTopology"];

/// An enum of the settings between a launcher and its sidecars, which are JSON.
const SETTING: &str = "TuningParameter";

/// Types that serde writes without deriving it.
const WRITTEN_BY_HAND: [&str; 1] = ["Enclosed"];

/// `number!(... Rank(u32), "rank ")`: a newtype that is written as the number in it.
fn number(item: &syn::ItemMacro) -> String {
    let tokens: Vec<proc_macro2::TokenTree> = item.mac.tokens.clone().into_iter().collect();
    let named = tokens.windows(2).find_map(|pair| match pair {
        [proc_macro2::TokenTree::Ident(name), proc_macro2::TokenTree::Group(inner)] => Some((name, inner.stream())),
        _ => None,
    });
    let (name, inner) = named.expect("number! names a type and what is in it");
    format!("type {name} = {inner}\n")
}

fn structure(item: &syn::ItemStruct) -> String {
    let name = &item.ident;
    match (&item.fields, name.to_string().as_str()) {
        // Their checks are not part of the format.
        (syn::Fields::Unnamed(_), "TensorName" | "JobName") => format!("type {name} = String\n"),
        (syn::Fields::Unnamed(_), "SidecarSet" | "Enclosed") => format!("type {name} = Vec<u8>\n"),
        (syn::Fields::Unnamed(fields), _) => {
            let inner = fields.unnamed.first().map(|field| spelled(&field.ty)).expect("a newtype has one field");
            format!("type {name} = {inner}\n")
        }
        (fields, _) => format!("struct {name}{}\n", content(fields)),
    }
}

fn enumeration(item: &syn::ItemEnum) -> String {
    let mut text = format!("enum {}\n", item.ident);
    for (index, variant) in item.variants.iter().enumerate() {
        writeln!(text, "  {index} {}{}", variant.ident, content(&variant.fields)).expect("strings grow");
    }
    text
}

fn content(fields: &syn::Fields) -> String {
    match fields {
        syn::Fields::Unit => String::new(),
        syn::Fields::Unnamed(fields) => {
            let types: Vec<String> = fields.unnamed.iter().map(|field| spelled(&field.ty)).collect();
            format!("({})", types.join(", "))
        }
        syn::Fields::Named(fields) => {
            let named = fields.named.iter().map(|field| {
                let name = field.ident.as_ref().expect("named fields have names");
                format!("{name}: {}", spelled(&field.ty))
            });
            format!(" {{ {} }}", named.collect::<Vec<_>>().join(", "))
        }
    }
}

/// A type without the spaces that tokens are printed with.
fn spelled(ty: &syn::Type) -> String {
    let text = ty.to_token_stream().to_string().replace(' ', "").replace(',', ", ").replace(';', "; ");
    // A shared pointer in memory is invisible on the wire.
    text.replace("Arc<Record>", "Record")
}

/// Whether serde writes it.
fn is_written(item: &syn::ItemStruct) -> bool {
    is_sent(&item.attrs) || WRITTEN_BY_HAND.iter().any(|name| item.ident == name)
}

fn is_sent(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("derive") && attribute.to_token_stream().to_string().contains("Serialize")
    })
}
