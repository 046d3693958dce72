{{/* Names, labels and addresses, that all templates share. */}}

{{/* The label of a host that a learner's name has, as certificates have it (sottovoce_rpc/principals.py): NAME */}}
{{- define "sottovoce.host" -}}
{{- if and (regexMatch "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$" .) (not (contains "--" .)) -}}
{{ . }}
{{- else -}}
h--{{ sha256sum . | trunc 32 }}
{{- end -}}
{{- end -}}

{{/* A learner's name without this release's own trust domain, where it holds that: list ROOT NAME */}}
{{- define "sottovoce.bare" -}}
{{- trimSuffix (printf "@%s" (index . 0).Values.domain) (index . 1) -}}
{{- end -}}

{{/* The name of what belongs to a principal, short enough for a StatefulSet's pods: list ROOT ROLE [NAME] */}}
{{- define "sottovoce.name" -}}
{{- $root := index . 0 -}}
{{- $parts := list $root.Release.Name (index . 1) -}}
{{- if gt (len .) 2 -}}{{- $parts = append $parts (include "sottovoce.host" (include "sottovoce.bare" (list $root (index . 2)))) -}}{{- end -}}
{{- $name := join "-" $parts -}}
{{- if gt (len $name) 52 -}}
{{ trunc 43 $name | trimSuffix "-" }}-{{ sha256sum $name | trunc 8 }}
{{- else -}}
{{ $name }}
{{- end -}}
{{- end -}}

{{/* What a service's pods are found by: list ROOT ROLE [NAME] */}}
{{- define "sottovoce.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- if gt (len .) 2 }}
sottovoce/learner: {{ include "sottovoce.host" (include "sottovoce.bare" (list $root (index . 2))) }}
{{- end }}
{{- end -}}

{{/* All labels: list ROOT ROLE [NAME] */}}
{{- define "sottovoce.labels" -}}
{{- $root := index . 0 -}}
{{ include "sottovoce.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* The host of a service in this cluster: list ROOT ROLE [NAME] */}}
{{- define "sottovoce.address" -}}
{{- $root := index . 0 -}}
{{ include "sottovoce.name" . }}.{{ $root.Release.Namespace }}.svc.{{ $root.Values.clusterDomain }}
{{- end -}}

{{/* host:port of the coordinator. */}}
{{- define "sottovoce.coordinator" -}}
{{- with .Values.coordinator.elsewhere.address -}}
{{ . }}
{{- else -}}
{{ include "sottovoce.address" (list . "coordinator") }}:7400
{{- end -}}
{{- end -}}

{{/* host:port of the eavesdropper. */}}
{{- define "sottovoce.eavesdropper" -}}
{{- with .Values.eavesdropper.elsewhere.address -}}
{{ . }}
{{- else -}}
{{ include "sottovoce.address" (list . "eavesdropper") }}:7500
{{- end -}}
{{- end -}}

{{/* Is it of this release? "true" or nothing. */}}
{{- define "sottovoce.coordinates" -}}
{{- if not .Values.coordinator.elsewhere.address -}}true{{- end -}}
{{- end -}}
{{- define "sottovoce.overhears" -}}
{{- if and (ne .Values.capture "none") (not .Values.eavesdropper.elsewhere.address) -}}true{{- end -}}
{{- end -}}

{{/* Do pods of their own serve the relays? "true" or nothing. */}}
{{- define "sottovoce.relayed" -}}
{{- if and (include "sottovoce.overhears" .) (has .Values.capture (list "relay" "wiretap")) (gt (int .Values.eavesdropper.workers) 0) -}}true{{- end -}}
{{- end -}}

{{/* An image: list ROOT TARGET */}}
{{- define "sottovoce.image" -}}
{{- $image := (index . 0).Values.image -}}
{{ $image.repository }}/{{ index . 1 }}:{{ $image.tag | default (index . 0).Chart.AppVersion }}
{{- end -}}

{{/* A learner with the defaults of all, as JSON: list ROOT NAME */}}
{{- define "sottovoce.learner" -}}
{{- $root := index . 0 -}}
{{- mergeOverwrite (deepCopy $root.Values.learner) (deepCopy (index $root.Values.learners (index . 1) | default dict)) | toJson -}}
{{- end -}}

{{/* The secret with the identity of a principal: dict "who" (list ROOT ROLE [NAME]) "principal" ROLE/NAME "named" SECRET */}}
{{- define "sottovoce.secret" -}}
{{- if (index .who 0).Values.identities.issuer.name -}}
{{ include "sottovoce.name" .who }}-identity
{{- else -}}
{{- required (printf "%s needs an identity: name the secret that holds it, or an issuer of cert-manager in identities.issuer" .principal) .named -}}
{{- end -}}
{{- end -}}

{{/* The volume with an identity: dict "root" ROOT "secret" SECRET. For this pod's group: a key that everybody can read is refused. */}}
{{- define "sottovoce.identity" -}}
name: identity
{{- if .root.Values.identities.authorities }}
projected:
  defaultMode: 0440
  sources:
    - secret:
        name: {{ .secret }}
        items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
    - configMap:
        name: {{ .root.Values.identities.authorities }}
{{- else }}
secret:
  secretName: {{ .secret }}
  defaultMode: 0440
{{- end }}
{{- end -}}

{{/* Is there an identity for `helm test`? "true" or nothing. */}}
{{- define "sottovoce.tested" -}}
{{- if or .Values.identities.issuer.name .Values.doctor.identity -}}true{{- end -}}
{{- end -}}
